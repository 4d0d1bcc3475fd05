"""Random weights for any config.json: peaked logits like a real model's, and no file to read.

For measuring and for tests of everything but the text. A tensor's values depend on the seed, its name and its shape
only, so the order in which a model takes them does not matter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.interfaces import Checkpoint, WeightSource
from framework_loaders.folder import read_folder
from framework_loaders.gguf import GgufLoader

MATRIX_STD = 0.02
ENDS = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|embed_in|embed_out|word_embeddings)\.weight$")
ENDS_STD = 2.5  # over sqrt(hidden): logits of unit-RMS hidden states then have a standard deviation of 2.5
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
FINAL_NORM = re.compile(r"^([a-z_]+\.)*(norm|norm_f|ln_f|layer_norm|final_layernorm|final_layer_norm)\.weight$")
"""Outside of numbered layers."""
QUANTIZED = ("_blocks", "_scales", "_scale_inv")
"""Ends of names of quantized forms: random bits are no weights."""
_PLUS_ONE = ("Gemma",)
"""Beginnings of architectures whose norms hold what is added to 1."""


class DummyLoader:
    """Loader `dummy`: needs a folder with a config.json, or a GGUF file of which it reads the header only."""

    def __init__(self, options: Any, ctx: None = None) -> None:
        assert not options, f"the dummy loader has no options, got {options!r}"

    def checkpoint(self, location: Path) -> Checkpoint:
        """The configuration (and tokenizer, if there is one). Raises CheckpointError without a readable config."""
        if location.is_file() and location.suffix == ".gguf":
            found = GgufLoader(None).checkpoint(location)
            return Checkpoint(location, "dummy", found.config, found.generation_config, found.tokenizer)
        return read_folder(location, "dummy")

    def open(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, seed: int) -> WeightSource:
        """Weights drawn on `device` from `seed`; equal on every run on the same kind of device."""
        holds_more = any(name.startswith(_PLUS_ONE) for name in checkpoint.architectures[:1])
        return DummySource(dtype, device, seed, norm=0.0 if holds_more else 1.0)


class DummySource:
    """Norms 1, vectors named `bias` 0, embedding and head N(0, 2.5 / sqrt(hidden)), all else N(0, 0.02): matrices, and
    what a family has under another name (biases of experts and routers, sinks).

    The final norm has a random sign at each place: a head that is the embedding would else find in the hidden state the
    very token that went in, and every text would repeat its last token.

    norm  what the norms of the family hold for a factor of 1
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, *, norm: float = 1.0) -> None:
        self.dtype, self.device, self.seed, self.norm = dtype, device, seed, norm

    def has(self, name: str) -> bool:
        """Any name is there, but for quantized forms of a tensor, and for the head: a model that is tied asks whether
        there is one all the same, and another one takes it without asking."""
        return not HEAD.search(name) and not name.endswith(QUANTIZED)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        if name.endswith(".bias"):
            return out.zero_()
        generator = torch.Generator(self.device).manual_seed(_tensor_seed(self.seed, name))
        if out.ndim == 1 and ("norm" in name or name.endswith(".weight")):
            if FINAL_NORM.match(name):
                return out.random_(0, 2, generator=generator).mul_(2).add_(self.norm - 2)
            return out.fill_(self.norm)
        std = ENDS_STD / shape[-1] ** 0.5 if ENDS.search(name) else MATRIX_STD
        return out.normal_(0.0, std, generator=generator)

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Holds nothing."""


def _tensor_seed(seed: int, name: str) -> int:
    """63 bits out of the seed and the tensor's name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
