"""The public names are lazy, and all of them are there."""

import subprocess
import sys

import framework


def test_importing_framework_imports_no_torch():
    program = "import framework, sys; framework.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there():
    assert all(getattr(framework, name) is not None for name in framework.__all__)


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(framework, "LMM")
