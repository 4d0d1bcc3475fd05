"""Installs the third-party packages of this folder once a session, from their folders and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "packages"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Folder with acme, broken, clash and future installed in it, for PYTHONPATH."""
    target = tmp_path_factory.mktemp("site")
    sources = tmp_path_factory.mktemp("sources")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    names = ["acme", "broken", "clash", "future"]
    for name in names:  # built from a copy, so that nothing is written into the repository
        subprocess.run(["cp", "-r", str(PACKAGES / name), str(sources)], check=True)
    subprocess.run([*command, "--target", str(target), *(str(sources / name) for name in names)], check=True)
    return target


@pytest.fixture
def framework(installed, tmp_path):
    """Runs `python -m framework WORDS` with the third-party packages beside ours, in an empty folder."""

    def run(*words, **env):
        return subprocess.run(
            [sys.executable, "-m", "framework", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
        )

    return run
