"""Threads of a server are not bound to cores, save where the user has said so."""

import os
import subprocess
import sys

import pytest

from framework.plugins import registry


@pytest.mark.parametrize("chosen", [("run", "serve"), ("bench", "serve")])
def test_what_serves_binds_no_threads(chosen):
    bound = registry().environment("cpu")
    assert bound["OMP_PROC_BIND"] == "close"
    assert registry().environment("cpu", ("run", "generate")) == bound
    assert registry().environment("cpu", chosen) == {**bound, "OMP_PROC_BIND": "false"}


def test_what_the_user_has_set_stays():
    code = (
        "import os; from framework.cli import prepare_environment; prepare_environment('cpu', [('run', 'serve')]); "
        "print(os.environ['OMP_PROC_BIND'], os.environ['OMP_PLACES'])"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    told = [
        subprocess.run([sys.executable, "-c", code], env=given | more, capture_output=True, text=True).stdout.split()
        for more in ({}, {"OMP_PROC_BIND": "spread"})
    ]
    assert told == [["false", "cores"], ["spread", "cores"]]
