"""Finds installed plugins and their configuration folders. Imports nobody's code, and nothing but the standard library.

Two entry-point groups: `framework.plugins` (a light module with hooks) and `framework.conf` (a package folder of YAML,
located without importing it, so that a plugin that raises on import cannot break composition). The registry, the
composer and `--help` call this.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from framework.errors import ConfigError, did_you_mean

PLUGIN_GROUP = "framework.plugins"
CONF_GROUP = "framework.conf"
OURS = "framework"
SWITCH = "FRAMEWORK_PLUGINS"
"""Environment variable: `-acme` leaves one plugin out, `samplers,attention` lets only those in; YAML and code alike."""

_log = logging.getLogger("framework")


def dist_name(ep: EntryPoint) -> str:
    """Name of the distribution that declares the entry point, `?` when it was made by hand."""
    return ep.dist.name if ep.dist is not None else "?"


def dist_version(ep: EntryPoint) -> str:
    return ep.dist.version if ep.dist is not None else "?"


def entry_points_of(group: str, found: Iterable[EntryPoint] | None = None) -> list[EntryPoint]:
    """Entry points of one group: ours first, then by distribution and name, each once, less those switched off.

    found  stands in for the environment's entry points in tests
    """
    candidates = entry_points(group=group) if found is None else [ep for ep in found if ep.group == group]
    unique: dict[tuple[str, str], EntryPoint] = {}
    for ep in candidates:  # an earlier folder of sys.path wins, as it does for imports
        unique.setdefault((_canonical(dist_name(ep)), ep.name), ep)
    ranked = sorted(unique.items(), key=lambda item: (item[0][0] != OURS, item[0]))
    return [ep for (dist, name), ep in ranked if is_switched_on(name, dist)]


def is_switched_on(name: str, dist: str) -> bool:
    """Whether the switch in the environment lets a plugin in; a word is an entry point's or a distribution's name."""
    words = _switch_words()
    refused = [word for word in words if word.startswith("-")]
    allowed = [word for word in words if not word.startswith("-")]
    if any(_means(word, name, dist) for word in refused):
        return False
    return not allowed or any(_means(word, name, dist) for word in allowed)


def unknown_switches(found: Iterable[EntryPoint] | None = None) -> list[str]:
    """One sentence for each word of the switch that is the name of no plugin: it would do something else than meant.

    found  stands in for the environment's entry points in tests
    """
    points = [*entry_points(group=PLUGIN_GROUP), *entry_points(group=CONF_GROUP)] if found is None else list(found)
    known = sorted({ep.name for ep in points} | {dist_name(ep) for ep in points} - {"?"})
    return [
        f"{SWITCH}: no plugin is named '{word.lstrip('-')}'.{did_you_mean(word.lstrip('-'), known)}"
        f" Installed: {', '.join(known)}"
        for word in _switch_words()
        if not any(_means(word, ep.name, dist_name(ep)) for ep in points)
    ]


def _switch_words() -> list[str]:
    return [word.strip() for word in os.environ.get(SWITCH, "").split(",") if word.strip()]


def _means(word: str, name: str, dist: str) -> bool:
    named = word.removeprefix("-").strip()
    return named == name or _canonical(named) == _canonical(dist)


def package_dir(dotted: str) -> Path | None:
    """Folder of a package, found without importing it; None if there is none."""
    top, *rest = dotted.split(".")
    spec = importlib.util.find_spec(top)  # finds a top-level name without running it
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location, *rest)
        if folder.is_dir():
            return folder
    return None


def own_conf_root() -> Path:
    """Our own folder of YAML: inside the package when installed from a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise AssertionError(f"no conf/config.yaml in {here} or {here.parent}: the installation is damaged")


def conf_roots() -> list[tuple[str, Path]]:
    """(distribution, folder) of every configuration folder, ours first."""
    roots = [(OURS, own_conf_root())]
    for ep in entry_points_of(CONF_GROUP):
        folder = package_dir(ep.value)
        if folder is None:
            _log.warning("%s %s announces the folder %r, which is not there", dist_name(ep), dist_version(ep), ep.value)
        else:
            roots.append((dist_name(ep), folder))
    return roots


def search_roots(config_dir: str | None = None) -> list[tuple[str, Path]]:
    """Configuration folders in the order in which they win, as in Hydra: ours, those of plugins, `--config-dir`.

    ConfigError for a `--config-dir` that is no folder; a file that another one hides is named in the log.
    """
    roots = conf_roots()
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir={config_dir}: there is no such folder")
        roots.append(("--config-dir", Path(config_dir).resolve()))
    for sentence in shadowed_files(roots):
        _log.warning(sentence)
    return roots


def config_files(root: Path) -> dict[str, Path]:
    """{`sampler/stage/min_p`: file} for the YAML files under one root; Hydra's own groups are left out."""
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    return {key: path for key, path in files.items() if not key.startswith("hydra/")}


def group_options(roots: Iterable[tuple[str, Path]]) -> dict[str, dict[str, tuple[str, Path]]]:
    """{group: {option: (distribution, file)}}; of two files with one name the first root's wins, as in Hydra."""
    groups: dict[str, dict[str, tuple[str, Path]]] = {}
    for dist, root in roots:
        for key, path in config_files(root).items():
            group, _, option = key.rpartition("/")
            if group:
                groups.setdefault(group, {}).setdefault(option, (dist, path))
    return groups


def shadowed_files(roots: Iterable[tuple[str, Path]]) -> list[str]:
    """One sentence for each YAML file that Hydra would pass over silently because an earlier root has its name."""
    first: dict[str, str] = {}
    sentences = []
    for dist, root in roots:
        for key in config_files(root):
            if key in first:
                sentences.append(f"{key}.yaml of {dist} is ignored: {first[key]} has a file of that name")
            first.setdefault(key, dist)
    return sentences


def _canonical(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()
