"""Token ids of what a stage's options name by text or by id. Called when a stage is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from framework.errors import shown
from framework.interfaces import StageContext
from framework.request import plain
from framework_samplers.own_args import integer


def ids_of(option: str, word: Any, ctx: StageContext) -> tuple[int, ...]:
    """Ids of `word`: a text, an id, or a list of ids; () for a text where the model has no tokenizer.

    ValueError, which begins with the option's name, for what is none of them, is empty, or is outside the vocabulary.
    """
    word = plain(word)
    if isinstance(word, str):
        ids = () if ctx.encode is None else tuple(ctx.encode(word))
        if ctx.encode is not None and not ids:
            raise ValueError(f"{option} has no tokens: {shown(word)}")
        return ids
    if isinstance(word, Iterable):
        ids = tuple(integer(f"{option}[{place}]", one, 0, ctx.vocab_size - 1) for place, one in enumerate(word))
        if not ids:
            raise ValueError(f"{option} must not be empty")
        return ids
    return (integer(option, word, 0, ctx.vocab_size - 1),)


def last_ids(option: str, words: Iterable[Any], ctx: StageContext) -> tuple[int, ...]:
    """The token that completes each of `words`, texts or ids, as it stands behind other text; each once, rising."""
    if isinstance(words, str):
        raise ValueError(f"{option} must be a list of texts or token ids, got {shown(words)}")
    found: set[int] = set()
    for place, word in enumerate(words):
        behind = f"a{word}" if isinstance(word, str) else word  # many tokenizers write a first word in another way
        found.update(ids_of(f"{option}[{place}]", behind, ctx)[-1:])
    return tuple(sorted(found))
