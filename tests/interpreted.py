"""Tests of Triton kernels: in its interpreter where no CUDA device is visible, compiled for one with `-m cuda`.

The choice has to be made before triton is imported, so a conftest imports this first, with the fixtures that it needs.
"""

import os
import warnings
from importlib.util import find_spec

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = find_spec("triton") is not None  # it exists for Linux alone
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
if HAS_TRITON:
    from triton.runtime import interpreter

    def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        """Ends of loops: the interpreter converts arrays of one element to int, which numpy no longer does."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


@pytest.fixture(autouse=True)
def quiet_interpreter():
    """numpy warns of what is meant: log of 0, exponentials of -inf, products that wrap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture(name="device", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def kernel_device(request):
    if request.param == "cpu" and HAS_CUDA:
        pytest.skip("a device is visible, so that kernels are compiled for it")
    return torch.device(request.param)
