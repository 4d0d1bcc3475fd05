"""The small files of a Hugging Face folder: config.json, generation_config.json, and where the tokenizer is.

Weights are not read here. Used by the loaders whose checkpoints are such folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.errors import CheckpointError
from framework.interfaces import Checkpoint
from framework.layers.nested import text_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")

_SIZES = ("vocab_size", "max_position_embeddings")
_CLASS_SIZES = {"gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072}}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file when it is missing, damaged or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file. Name a folder that holds one, or download it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}). Download or write it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}. Download it again.")
    return value


def read_folder(location: Path, format: str) -> Checkpoint:
    """The Checkpoint of a folder with a config.json, before any weight is read.

    Raises CheckpointError when config.json is missing or damaged, or names Python code of its own.
    """
    config = read_json(location / "config.json")
    refuse_code(location, config)
    generation = location / "generation_config.json"
    has_tokenizer = any((location / name).is_file() for name in TOKENIZER_FILES)
    return Checkpoint(
        location=location,
        format=format,
        config=with_sizes(config),
        generation_config=read_json(generation) if generation.is_file() else {},
        tokenizer=location if has_tokenizer else None,
    )


def with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `vocab_size` and `max_position_embeddings`, which an engine is sized by, where it has them.

    They are those of its text model (`layers.nested`), which leaves them out where its class has them by default.
    GPT-2 has another word for the second.
    """
    text = text_config(config)
    found = {
        "max_position_embeddings": config.get("n_positions"),
        **_CLASS_SIZES.get(str(text.get("model_type")), {}),
        **{key: text[key] for key in _SIZES if text.get(key) is not None},
    }
    return {**config, **{key: value for key, value in found.items() if value is not None}}


def refuse_code(location: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the config asks for running Python files that come with the checkpoint.

    One that only names such files (`auto_map`) is served by what has its architecture, if anything has: the files are
    never run.
    """
    if config.get("trust_remote_code"):
        raise CheckpointError(
            f"{location / 'config.json'}: trust_remote_code={config['trust_remote_code']!r} asks for code of the "
            "checkpoint's own, which is never run. Take the key out: an architecture that is served is served without."
        )
