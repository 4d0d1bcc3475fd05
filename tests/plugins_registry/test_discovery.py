"""Plugins and their YAML are found without importing anybody's code, ours first."""

from importlib.metadata import Distribution, EntryPoint

import pytest

from framework import discovery
from framework.cli import print_help
from framework.discovery import (
    config_files,
    entry_points_of,
    group_options,
    is_switched_on,
    package_dir,
    search_roots,
    shadowed_files,
    unknown_switches,
)
from framework.errors import ConfigError
from framework.plugins import Registry


class Dist(Distribution):
    """A distribution that has a name and nothing else."""

    def __init__(self, name):
        self._name = name

    def read_text(self, filename):
        return f"Name: {self._name}\nVersion: 1.0\n" if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


def point(name, dist):
    return EntryPoint(name, "m.plugin", "framework.plugins")._for(Dist(dist))


def test_ours_come_first_then_distribution_then_name():
    found = [point("b", "zeta"), point("a", "zeta"), point("z", "framework"), point("c", "acme")]
    assert [ep.name for ep in entry_points_of("framework.plugins", found)] == ["z", "c", "a", "b"]


def test_repeated_announcement_of_one_distribution_counts_once():
    found = [point("a", "My_Dist"), point("a", "my-dist"), EntryPoint("x", "m", "other.group")]
    assert len(entry_points_of("framework.plugins", found)) == 1


@pytest.mark.parametrize(
    ("switch", "on"),
    [("", True), ("-acme", False), ("-other", True), ("acme", True), ("other", False), ("acme,-acme-dist", False),
     ("-Acme_Dist", False), ("-acme.dist", False), ("ACME-dist", True), ("- acme", False)],
)  # fmt: skip
def test_switch_allows_and_refuses_by_plugin_or_distribution(monkeypatch, switch, on):
    monkeypatch.setenv(discovery.SWITCH, switch)
    assert is_switched_on("acme", "acme_dist") is on


def test_word_of_the_switch_that_names_no_plugin_is_reported_with_the_nearest(monkeypatch):
    found = [point("samplers", "Acme_Dist"), point("attention", "Acme_Dist")]
    monkeypatch.setenv(discovery.SWITCH, "-samplrs, attention,acme-dist")
    assert unknown_switches(found) == [
        "FRAMEWORK_PLUGINS: no plugin is named 'samplrs'. Did you mean 'samplers'?"
        " Installed: Acme_Dist, attention, samplers"
    ]
    monkeypatch.setenv(discovery.SWITCH, "")
    assert unknown_switches(found) == []


@pytest.mark.parametrize("word", ["-samplrs", "samplrs"])
def test_registry_warns_of_a_word_that_names_no_plugin(monkeypatch, caplog, word):
    monkeypatch.setenv(discovery.SWITCH, word)
    Registry.load()
    assert "FRAMEWORK_PLUGINS: no plugin is named 'samplrs'. Did you mean 'samplers'?" in caplog.text


def test_package_folder_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "explosive" / "conf").mkdir(parents=True)
    (tmp_path / "explosive" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_dir("explosive.conf") == tmp_path / "explosive" / "conf"
    assert package_dir("explosive.absent") is None
    assert package_dir("no_such_package.conf") is None


@pytest.fixture
def roots(tmp_path):
    for dist, files in {"ours": ["config", "policy/fcfs"], "acme": ["policy/fcfs", "policy/lifo", "hydra/x/y"]}.items():
        for name in files:
            path = tmp_path / dist / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("name: x\n")
    return [("ours", tmp_path / "ours"), ("acme", tmp_path / "acme")]


def test_first_root_wins_a_file_and_the_loser_is_named(roots):
    assert {option: dist for option, (dist, _) in group_options(roots)["policy"].items()} == {
        "fcfs": "ours",
        "lifo": "acme",
    }
    assert shadowed_files(roots) == ["policy/fcfs.yaml of acme is ignored: ours has a file of that name"]


def test_hydras_own_groups_are_left_out(roots):
    assert list(config_files(roots[1][1])) == ["policy/fcfs", "policy/lifo"]


def test_folder_of_the_user_comes_last_and_must_be_there(tmp_path):
    assert search_roots(str(tmp_path))[-1] == ("--config-dir", tmp_path)
    with pytest.raises(ConfigError, match=r"^--config-dir=nowhere: there is no such folder$"):
        search_roots("nowhere")


def test_help_refuses_a_folder_that_is_not_there():
    with pytest.raises(ConfigError, match=r"^--config-dir=nowhere: there is no such folder$"):
        print_help({"--config-dir": "nowhere"})
