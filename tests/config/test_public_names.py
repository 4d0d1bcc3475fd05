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


def test_a_promised_class_is_imported_and_refused_as_not_built_when_it_is_made():
    from framework import LLM, AsyncLLM, SamplingParams

    assert LLM and SamplingParams
    with pytest.raises(NotBuiltError, match=r"framework\.AsyncLLM is not built yet"):
        AsyncLLM("model")


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(framework, "LMM")
