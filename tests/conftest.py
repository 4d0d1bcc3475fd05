"""What every test shares: one thread, interrupts that arrive, and `cuda` tests skipped where no device is visible.

Tiny models gain nothing from threads, and threads that wait for each other make the suite slow on a busy machine. Set
OMP_NUM_THREADS to run it with more.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """Puts the log back as it was: a command line in this process sets it up for a process of its own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.fixture
def typed_here(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_logging: None
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    from framework.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return run
