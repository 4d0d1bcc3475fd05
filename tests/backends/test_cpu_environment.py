"""Thread settings that must be there before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from framework_backends import cpu_environment
from framework_backends.cpu_environment import environment, physical_cores


def test_environment_binds_one_thread_to_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_environment, "physical_cores", lambda: 7)
    assert environment() == {"OMP_NUM_THREADS": "7", "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}


def test_hyper_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    files = {cpu_environment._TOPOLOGY.format(cpu): names for cpu, names in siblings.items()}
    monkeypatch.setattr(cpu_environment.os, "sched_getaffinity", lambda pid: set(siblings), raising=False)
    monkeypatch.setattr(cpu_environment, "_read", lambda path: files.get(path, ""))
    assert physical_cores() == 2


def test_container_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_environment.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, cores in (("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("", 8)):
        monkeypatch.setattr(cpu_environment, "_read", lambda path, q=quota: q if path.endswith("cpu.max") else "")
        assert physical_cores() == cores


def test_module_imports_no_torch() -> None:
    code = "import framework_backends.cpu_environment as e, sys; e.environment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
