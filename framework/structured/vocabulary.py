"""The bytes of every token of a model, as grammars want them. Read once an engine, when the first request needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framework.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """What each id of a model adds to a text.

    tokens    [vocab_size] bytes in the middle of a text; nothing for special tokens, eos and padding
    existing  [ceil(vocab_size / 32)] int32 bits of the ids that are tokens at all
    opening   bits of the ids that add the same at the beginning of a text, where a decoder may strip a space; None
              when all do
    """

    tokens: list[bytes]
    existing: NDArray[np.int32]
    opening: NDArray[np.int32] | None


def read(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> Vocabulary:
    """RequestError for a tokenizer whose tokens are other bytes beside other tokens: no mask could be right."""
    pieces, silent = tokenizer.pieces, tokenizer.special_ids.union(eos_token_ids)
    ids = range(vocab_size)
    existing = bits_of((i for i in ids if pieces.has(i)), vocab_size)
    plain = [i for i in ids if i not in silent and pieces.has(i)]
    alone = {i: pieces.join([i], None) for i in plain}
    if not pieces.looks_back:
        return Vocabulary([alone.get(i, b"") for i in ids], existing, None)
    letters = [i for i in plain if alone[i].isalnum()]
    before = (letters[0], letters[-1]) if letters else (None,)
    later = {i: {pieces.join([i], other) for other in before} for i in plain}
    opening = [i for i in plain if later[i] == {alone[i]}]
    if tokenizer.clean_up_spaces or not opening or any(len(spelled) > 1 for spelled in later.values()):
        raise RequestError(
            "structured_outputs: what a token of this model's tokenizer adds to a text depends on the token before it, "
            "which no grammar can follow. Use a model whose tokenizer is byte-level or falls back to bytes"
        )
    return Vocabulary([next(iter(later.get(i, {b""}))) for i in ids], existing, bits_of(opening, vocab_size))


def bits_of(ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """[ceil(vocab_size / 32)] int32 with the bits of `ids` set: bit i % 32 of word i // 32."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[np.fromiter(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
