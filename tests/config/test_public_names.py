"""The public names are lazy; a promised one that is not built is refused by name."""

import subprocess
import sys

import pytest

import framework
from framework.errors import NotBuiltError


def test_importing_framework_imports_no_torch():
    program = "import framework, sys; framework.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there():
    assert all(getattr(framework, name) is not None for name in framework.__all__)


def test_promised_name_is_refused_as_not_built():
    with pytest.raises(NotBuiltError, match=r"framework\.AsyncLLM is not built yet"):
        _ = framework.AsyncLLM


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(framework, "LMM")
