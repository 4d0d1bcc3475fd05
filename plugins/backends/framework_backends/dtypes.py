"""Words of `engine.dtype` beside `auto`, whose meaning is each backend's own."""

from __future__ import annotations

import torch

from framework.errors import ConfigError, did_you_mean

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_dtype(word: str) -> torch.dtype:
    """Raises ConfigError for a word that is not known."""
    if word not in _DTYPES:
        known = ", ".join(("auto", *_DTYPES))
        raise ConfigError(f"engine.dtype='{word}' is not known. Use one of {known}.{did_you_mean(word, _DTYPES)}")
    return _DTYPES[word]
