"""The launches for compute-sanitizer, in Triton's interpreter, and what the script makes of a sanitizer's answer."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDERS = ("plugins/backends/framework_backends/triton", "plugins/attention/framework_attention/triton")


@pytest.fixture
def sanitize(script):
    return script("sanitize")


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Makes a compute-sanitizer that prints a text and ends with a code; the one that is found."""

    def make(text, code):
        path = tmp_path / "bin" / "compute-sanitizer"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return make


def kernels():
    """Names of all kernels, out of their sources."""
    sources = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    return {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is visible: run benchmarks/sanitize.py there")
def test_every_kernel_is_launched_and_gives_what_torch_gives():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "sanitize.py"), "--interpret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "_kernel " in line]
    assert {name for name, *_ in rows} == kernels() and len(kernels()) > 20
    assert all(int(count) > 0 for _, count, _ in rows)


def launched(sanitize, monkeypatch, group):
    """Exit code of a run whose only group calls `group` with a function that launches a kernel by name."""

    class Kernels:
        def __init__(self, name):
            self.fn = SimpleNamespace(__module__="ours", __name__=name)

        def run(self, *args, **words):
            return args, words

    monkeypatch.setattr(sanitize, "_launching_class", lambda interpret: Kernels)
    monkeypatch.setattr(sanitize, "kernels_of_ours", lambda: iter([("ours", "one_kernel"), ("ours", "two_kernel")]))
    monkeypatch.setattr(
        sanitize, "GROUPS", {"some": lambda device: group(lambda name: Kernels(name).run(1, grid=(1,)))}
    )
    return sanitize.launch_all(["some"], interpret=True)


def test_a_kernel_that_is_not_launched_is_named(sanitize, monkeypatch, capsys):
    assert launched(sanitize, monkeypatch, lambda launch: launch("one_kernel")) == 1
    out = capsys.readouterr().out
    assert "never launched: ours.two_kernel" in out and "never launched: ours.one_kernel" not in out


def test_launches_are_counted_by_kernel(sanitize, monkeypatch, capsys):
    names = ["one_kernel", "two_kernel", "one_kernel"]
    assert launched(sanitize, monkeypatch, lambda launch: [launch(name) for name in names]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "_kernel " in line]
    assert {name: int(count) for name, count, _ in rows} == Counter(names)


def test_a_result_that_differs_fails_the_run(sanitize, monkeypatch, capsys):
    def group(launch):
        launch("one_kernel"), launch("two_kernel")
        sanitize.near(torch.tensor([1.0]), torch.tensor([torch.nan]))

    assert launched(sanitize, monkeypatch, group) == 1
    assert "some failed: " in capsys.readouterr().out


def run_main(sanitize, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["sanitize.py", *words])
    return sanitize.main()


def test_without_a_device_one_line_says_so(sanitize, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_main(sanitize, monkeypatch, "--tool", "all") == 2
    assert capsys.readouterr() == (
        "", "benchmarks/sanitize.py: torch sees no CUDA device here, and nothing was checked\n"
    )  # fmt: skip


def test_without_a_sanitizer_one_line_says_so(sanitize, sanitizer, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_main(sanitize, monkeypatch, "--tool", "memcheck") == 2
    assert "compute-sanitizer is neither on PATH nor in CUDA_HOME/bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0),
        ("========= ERROR SUMMARY: 3 errors", 9, 9),
        ("no sanitizer speaks here", 0, 1),
        ("========= Error: Device not supported. Please refer to the documentation", 1, 2),
    ],
)
def test_the_exit_code_is_what_the_sanitizer_found(sanitize, sanitizer, monkeypatch, capsys, text, code, expected):
    made = sanitizer(text, code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "compile_all", lambda names: 0)
    assert sanitize.find_sanitizer() == made
    assert run_main(sanitize, monkeypatch, "--tool", "racecheck") == expected
    assert text in capsys.readouterr().out


def test_a_long_report_is_cut_and_keeps_its_summary(sanitize):
    lines = ["kernel  launches", *[f"========= line {i}" for i in range(9)], "========= ERROR SUMMARY: 9 errors"]
    report = sanitize.report_of("\n".join(lines), most=2)
    assert report.splitlines() == [lines[0], *lines[1:3], lines[-1]]
