"""The whole repository is clean: style, format and types, with the settings of pyproject.toml."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_repository_is_clean(words):
    if find_spec(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed; it comes with the extra `dev`")
    result = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
