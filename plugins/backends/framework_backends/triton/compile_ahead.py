"""Kernels that steps need, compiled side by side before the steps run: alone they compile one after another.

A step is called where nothing is executed (in a recording that is thrown away), and launches nothing meanwhile: Triton
hands what it lacks to `_Collected`, which compiles it in threads. Triton's passes and assembler let other threads run.
Called by `cuda_graphs`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import triton

_MOST_THREADS = 16


class _Collected(triton.AsyncCompileMode):
    """While it is entered kernels that are not there are compiled by the executor, and their launches left out.

    Ends when all are compiled. An error of the compiler is raised where the kernel is launched, and not here.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor, ignore_errors=True)

    def submit(self, key: Any, compile_: Callable[[], Any], *words: Any) -> None:
        """Compiles once what has this key. Triton takes None for a kernel that is not to be launched."""
        if key not in self.future_kernels:
            super().submit(key, partial(_ready, compile_), *words)


def _ready(compile_: Callable[[], Any]) -> Any:
    """The kernel on the device, behind a launcher: with Triton 3.6 a C compiler makes one for every signature, and the
    first launch waits for it. A kernel of which this fails is not kept, so that the launch makes it and tells why."""
    kernel = compile_()
    _ = kernel.run
    return kernel


def compile_ahead(steps: Callable[[], Any]) -> None:
    """Calls `steps`, which nothing may execute, and returns when the kernels that it lacked are compiled.

    In a context of its own: what fails here, launches of others are not left out for it.
    """
    copy_context().run(_collect, steps)


def _collect(steps: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads, _Collected(threads):
        steps()
