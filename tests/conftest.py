"""What every test shares: one thread, interrupts that arrive, and `cuda` tests skipped where no device is visible.

Tiny models gain nothing from threads, and threads that wait for each other make the suite slow on a busy machine. Set
OMP_NUM_THREADS to run it with more.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, which no conftest does
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and their children inherit it: nothing that a test interrupts would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device is visible"))
