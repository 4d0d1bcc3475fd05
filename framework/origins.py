"""Who set each value of a composed configuration: which file, or which word of the command line.

Reads the files in the order in which Hydra merged them, by Hydra's own list. The command line hands the result to
`run=explain`; nothing is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from framework.composing import loader_of
from framework.discovery import OURS
from framework.runs import Setting
from framework.words import TEXT_KEYS, Roots

NOT_SHOWN = ("hydra", "run", "bench", "server", "sweep")
"""Nodes that say what the command line does, and nothing of the engine."""
Origins = dict[str, tuple[str, str]]


def settings_of(cfg: DictConfig, words: Sequence[str], roots: Roots, primary: str) -> list[Setting]:
    """Every value of `cfg` with who set it, in the order of the configuration.

    words  as Hydra got them when it composed `cfg` from `primary` and `roots`
    """
    with loader_of(roots) as loader:
        defaults = loader.compute_defaults_list(primary, list(words), RunMode.RUN)
        origins: Origins = {}
        for default in defaults.defaults:
            _add_file(origins, loader, default, roots, words)
    for override in defaults.config_overrides:
        _add_word(origins, override)
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict), "a composed configuration is a mapping"
    leaves = _leaves({str(key): value for key, value in plain.items() if key not in NOT_SHOWN})
    shown = [(key, value) for key, value in leaves if value is not None or key not in TEXT_KEYS]
    return [Setting(key, value, *_origin(key, origins)) for key, value in shown]


def _origin(key: str, origins: Origins) -> tuple[str, str]:
    """Of the key itself, or of what it was written inside of (`sampler.logit_bias={7:1}` sets sampler.logit_bias.7)."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins[key]


def _add_file(
    origins: Origins, loader: ConfigLoaderImpl, default: ResultDefault, roots: Roots, words: Sequence[str]
) -> None:
    path = default.config_path or ""
    if path.startswith("hydra/") or default.package == "hydra":
        return
    loaded = loader._load_single_config(default, loader.repository).config
    origin = _file_origin(path, roots, _chosen_by(path, words))
    values = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(values, dict), f"{path} is a mapping, or Hydra would have refused it"
    for key, _ in _leaves({str(k): v for k, v in values.items()}):
        origins[key] = origin


def _file_origin(path: str, roots: Roots, word: str) -> tuple[str, str]:
    dist, file = next((dist, root / f"{path}.yaml") for dist, root in roots if (root / f"{path}.yaml").is_file())
    shown = f"conf/{path}.yaml" if dist == OURS else _shown(file)
    if dist not in (OURS, "--config-dir"):
        shown += f" of {dist}"
    source = {OURS: "group file" if "/" in path else "default", "--config-dir": "file"}.get(dist, "plugin")
    return source, shown + (f", chosen by {word}" if word else "")


def _chosen_by(path: str, words: Sequence[str]) -> str:
    """The word that chose a group's file, empty when the defaults list did."""
    group, _, option = path.rpartition("/")
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key.partition("@")[0] == group and option in value.strip("[]").split(","):
            return word.lstrip("+")
    return ""


def _add_word(origins: Origins, override: Override) -> None:
    key = override.key_or_group
    for inner in [name for name in origins if name.startswith(f"{key}.")]:  # a mapping is replaced whole
        del origins[inner]
    word = key if key in TEXT_KEYS else (override.input_line or key).lstrip("+")
    origins[key] = ("command line", word)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value that is no mapping, and of mappings without keys."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(file: Path) -> str:
    """Relative to the working directory where it is below it."""
    short = os.path.relpath(file)
    return str(file) if short.startswith("..") else short
