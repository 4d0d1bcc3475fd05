"""A program's beginning under which kernels are compiled for a device that is not there, and none is launched."""


def absent(capability: int) -> str:
    """For a device of this compute capability, 90 for 9.0."""
    return _BEGINNING.replace("CAPABILITY", str(capability))


_BEGINNING = '''
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Absent:
    """A device that is not there: kernels are compiled for it and never launched."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)


driver.set_active(Absent())
run = JITFunction.run
'''
HOPPER = absent(90)
