"""Some seconds of the soak of a server; `python benchmarks/serve_soak.py` takes half an hour."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"


@pytest.mark.full
@pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`")
def test_seconds_of_mixed_load_leave_nothing_behind_and_give_the_tokens_of_a_quiet_run() -> None:
    words = ["--minutes", "0.1", "--round", "4", "--rate", "40"]
    done = subprocess.run([sys.executable, str(SOAK), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "verdict: good"
    assert " 0 compared" not in done.stdout and " 0 faults" in done.stdout
