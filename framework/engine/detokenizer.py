"""Token ids to text, a step at a time, without ever emitting half a character.

A character may take several tokens: its first bytes are held back until it is whole, and become U+FFFD where it never
will be. The cost is that of the new tokens, however long the text is.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from framework.clean_up import GrowingCleanUp

if TYPE_CHECKING:
    from framework.pieces import Pieces

_Utf8 = getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """What the detokenizer reads of a `framework.tokenizer.Tokenizer`."""

    pieces: Pieces
    special_ids: frozenset[int]
    clean_up_spaces: bool


class Detokenizer:
    """Incremental text of one completion: what `add` returns, and `finish` at last, concatenates to the whole text."""

    __slots__ = ("_bytes", "_cleaner", "_pieces", "_previous", "_skipped")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._pieces = vocabulary.pieces
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._bytes = _Utf8("replace")
        self._cleaner = GrowingCleanUp() if vocabulary.clean_up_spaces else None
        self._previous: int | None = None

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` add and that no later token can change."""
        if self._skipped and not self._skipped.isdisjoint(token_ids):
            token_ids = [i for i in token_ids if i not in self._skipped]
        text = self._bytes.decode(self._pieces.join(token_ids, self._previous))
        if self._pieces.looks_back:
            self._previous = next((i for i in reversed(token_ids) if self._pieces.has(i)), self._previous)
        return text if self._cleaner is None else self._cleaner.add(text)

    @property
    def rest(self) -> str:
        """Whole characters that are held back all the same, as they would stand if the text ended here."""
        return "" if self._cleaner is None else self._cleaner.rest

    def finish(self) -> str:
        """The end of the text: what is held back, and U+FFFD for a character that is not whole."""
        text = self._bytes.decode(b"", True)
        return text if self._cleaner is None else self._cleaner.add(text) + self._cleaner.rest
