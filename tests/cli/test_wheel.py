"""What a wheel holds: the core, every plugin package, and the YAML inside the package."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_core_plugins_and_yaml_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for plugin in (ROOT / "plugins").glob("*/framework_*/plugin.py"):
        assert f"{plugin.parent.name}/plugin.py" in names
    assert {"framework/cli.py", "framework/conf/config.yaml", "framework/conf/sampler/stage/min_p.yaml"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "plugins", "conf"))]


def test_wheel_works_beside_folders_named_as_ours(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for name in ("plugins", "conf"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "config.yaml").write_text("mine: 1\n")
    result = subprocess.run(
        [sys.executable, "-m", "framework", "--info", "searchpath"],
        cwd=tmp_path / "work",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert f"file://{tmp_path}/site/framework/conf" in result.stdout
