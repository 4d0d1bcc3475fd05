"""`run=new`: the package of each kind passes its own tests and `run=check` as it stands, installed like anybody's."""

import os
import subprocess
import sys

import pytest

from framework.errors import ConfigError
from framework.runs import new
from framework.runs.new_skeletons import SKELETONS

KINDS = list(SKELETONS)


def run_python(*words, site, folder):
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """(folder with a package of each kind, folder that they are installed in)."""
    folder, site = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("site")
    for kind in KINDS:
        new._write(
            folder / f"my_{kind}", {folder / f"my_{kind}" / p: t for p, t in new.filled(kind, f"my_{kind}").items()}
        )
    offline = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(site)]
    packages = [str(folder / f"my_{kind}") for kind in KINDS]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, *packages], check=True)
    return folder, site


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
def test_package_passes_check_as_it_stands(written, kind):
    folder, site = written
    ran = run_python("-m", "framework", "check", f"{kind}/my_{kind}", site=site, folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(f"{kind}/my_{kind} of my-{kind.replace('_', '-')} 0.1.0, cases ")
    assert "not checked" not in ran.stdout


def test_packages_pass_their_own_tests_as_they_stand(written):
    folder, site = written
    tests = [f"my_{kind}" for kind in KINDS]
    ran = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", *tests, site=site, folder=folder
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "failed" not in ran.stdout


def test_what_was_written_and_what_comes_next_is_printed(typed_here, tmp_path):
    code, out, err = typed_here("new", "stage/my_stage", "run.folder=there")
    assert (code, err) == (0, "")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    lines = out.splitlines()
    assert files == {line.strip() for line in lines[1 : lines.index("")]}
    assert "  pip install -e ./there" in lines and "  python -m framework check stage/my_stage" in lines


def test_nothing_is_overwritten(typed_here, tmp_path):
    (tmp_path / "my_stage").mkdir()
    (tmp_path / "my_stage" / "mine.py").write_text("mine")
    code, out, err = typed_here("new", "stage/my_stage")
    assert (code, out) == (2, "")
    assert err == "error: my_stage is there already, and nothing is overwritten. Say run.folder=ANOTHER\n"
    assert (tmp_path / "my_stage" / "mine.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (None, "new needs to know what, as in new stage/my_stage. Kinds: stage, policy"),
        ("stage", "new needs to know what"),
        ("stge/x", r"target=stge/x: there is no kind 'stge'. Did you mean 'stage'\?"),
        ("loader/mine", "target=loader/mine: components of kind loader have no skeleton. Kinds: stage"),
        ("stage/My-Stage", "'My-Stage' is no name of a package. Use small letters, digits and _"),
        ("stage/lambda", "'lambda' is no name of a package"),
        ("stage/min_p", "framework has a component of that name. Choose another"),
        ("stage/json", "there is a module of the name json, which would be hidden"),
    ],
)
def test_name_that_cannot_be_had_is_refused(target, error):
    with pytest.raises(ConfigError, match=error):
        new.named(target)
