"""Some seconds of the soak, on every run of the suite; `python benchmarks/soak` takes twenty minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak"


def test_seconds_of_all_at_once_leave_nothing_behind_and_give_the_tokens_of_a_quiet_run() -> None:
    words = ["--seconds", "4", "--round", "1.5", "--sample", "5"]
    done = subprocess.run([sys.executable, str(SOAK), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "verdict: good"
    assert " 0 compared" not in done.stdout and " 0 faults" in done.stdout
