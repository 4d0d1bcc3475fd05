"""Token ids to text, a step at a time, without ever emitting half a character.

A byte-level tokenizer may need several tokens for one character: text is held back while its end decodes to the
replacement character, and given out once the character is whole or the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental text of one completion. The pieces that `add` returns concatenate to `text`."""

    __slots__ = ("_decoder", "_ids", "_read", "_skip_special", "_start", "text")

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        self._decoder, self._skip_special = decoder, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # ids[start:read] are decoded again to see what ids[read:] add
        self._read = 0
        self.text = ""

    def add(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Text that `token_ids` add to what was given out before; `final` gives out an unfinished character as well."""
        self._ids.extend(token_ids)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if not final and (after.endswith("�") or len(after) < len(before)):
            return ""
        piece = after[len(before) :]
        if piece:
            # The last piece stays in the window: a decoder may treat a token at the very start of a text otherwise.
            self._start = self._read
        self._read = len(self._ids)
        self.text += piece
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special) if ids else ""
