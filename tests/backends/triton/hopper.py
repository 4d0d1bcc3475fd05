"""A program's beginning under which kernels are compiled for a device that is not there, and none is launched."""

HOPPER = '''
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """A device that is not there: kernels are compiled for it and never launched."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)


driver.set_active(Hopper())
run = JITFunction.run
'''
