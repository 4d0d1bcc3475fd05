"""Kernels are compiled side by side and launched by nobody meanwhile; what fails disturbs no launch behind it."""

import subprocess
import sys

from framework_backends.triton.compile_time import WallSeconds

from .hopper import HOPPER

PROGRAM = (
    HOPPER
    + """
import threading
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

from triton.runtime._async_compile import active_mode
from framework_backends.triton.compile_ahead import compile_ahead
from framework_backends.triton.compile_time import CompileTime
from framework_backends.triton.post_update import post_update_kernel as kernel, Known, Prepared

longs, ints = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
told = Prepared(longs, longs, longs, longs), Known(ints, ints, ints)
compiled = []
knobs = triton.knobs
knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["repr"])


def launch(block, **words):
    return kernel[(1,)](*told, longs, 8, 8, 8, 1, 1, BLOCK=block, num_warps=1, **words)


def step():
    for block in (32, 64, 32):
        assert launch(block) is None
    assert not compiled


def launcher(src, metadata):
    launchers.append(threading.current_thread() is threading.main_thread())
    return lambda *words: launched.append(words)


launchers, launched = [], []
Absent.launcher_cls = staticmethod(launcher)
Absent.utils = SimpleNamespace(
    get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=lambda *words: (0, 0, 32, 0, 1024)
)
clock = CompileTime()
compile_ahead(step)
assert len(compiled) == 2, compiled
assert launchers == [False, False], launchers
launch(32)
assert len(launchers) == 2 and len(launched) == 1


def full(*words):
    raise MemoryError("the device is full")


fits, Absent.utils.load_binary = Absent.utils.load_binary, full
compile_ahead(lambda: launch(16))
assert len(compiled) == 2, "what cannot be loaded is kept"
try:
    launch(16)
except MemoryError:
    Absent.utils.load_binary = fits
else:
    raise AssertionError("the launch does not tell why")
compiled.clear()
compiled.extend((None, None))
assert 0 < clock.seconds < 60
before = clock.seconds
for block in (32, 64):
    kernel.warmup(*told, longs, 8, 8, 8, 1, 1, BLOCK=block, num_warps=1, grid=(1,))
assert len(compiled) == 2 and clock.seconds == before


def fails():
    launch(128)
    raise KeyboardInterrupt


try:
    compile_ahead(fails)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("it is dropped")
assert active_mode.get() is None, "launches are left out for good"


def wrong():
    launch(33)  # no power of two: for the compiler to refuse


compile_ahead(wrong)
assert len(compiled) == 3, compiled
print("done")
"""
)


def test_launches_are_left_out_while_their_kernels_are_compiled(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_seconds_in_which_several_kernels_compile_count_once():
    wall = WallSeconds()
    for start, end in ((1.0, 2.0), (1.5, 3.0), (1.2, 2.5), (4.0, 5.0), (0.5, 6.0), (7.0, 8.0)):
        wall.add(start, end)
    assert wall.total == 6.5
