"""What the distributions hold besides code: types for users of every package, and a source one that can test itself."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_every_package_says_that_it_is_typed():
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_readme_is_the_projects_long_description():
    assert (ROOT / PYPROJECT["project"]["readme"]).is_file()


@pytest.fixture(scope="module")
def source_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_source_distribution_holds_all_that_its_tests_read(source_files):
    wanted = {"framework/py.typed", "conf/config.yaml", "docs/plugins.md", "benchmarks/cpu.py", ".ci/run", "README.md"}
    assert wanted | {"dashboards/grafana.json"} <= source_files
    assert {f"{name}/py.typed" for name in PACKAGES} <= source_files
    assert not [name for name in source_files if "__pycache__" in name or name.startswith(".venv")]
