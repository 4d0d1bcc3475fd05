"""A small model for engines of checks: tokens are bytes and some special ones, logits a table of the last token.

The suites that run real engines write it into a temporary folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from framework.testing.crafted import save_crafted
from framework.testing.stage_bench import VOCAB_SIZE

MAX_MODEL_LEN = 64
OFTEN = slice(5, 13)
"""Tokens that come again and again, so that what a stage knows of the text before matters."""


def save_byte_model(folder: Path, eos_token_ids: Sequence[int] = ()) -> Path:
    """Writes weights, configuration and tokenizer. Returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 2.5
    table[:, OFTEN] += 4.0
    save_crafted(folder, table, eos_token_id=list(eos_token_ids) or None, max_len=MAX_MODEL_LEN)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{i}>" for i in range(len(alphabet), VOCAB_SIZE)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Engines of a check are no news: only warnings are logged."""
    log = logging.getLogger("framework")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
