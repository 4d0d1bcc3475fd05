"""Text without the spaces that word-level decoders leave before punctuation and contractions.

Whole texts and growing ones: of a text that goes on, the end may still change. Called by the tokenizer and by the
detokenizer, for checkpoints that ask for it (`clean_up_tokenization_spaces`).
"""

from __future__ import annotations

_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def clean_up(text: str) -> str:
    """`text` with each of the spaced forms closed up, in the order in which transformers does it."""
    for spaced in _SPACED:
        text = text.replace(spaced, spaced.strip())
    return text


class GrowingCleanUp:
    """`clean_up` of a text that arrives in parts: what `add` returns, and `rest` at last, concatenates to it."""

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw = ""

    def add(self, raw: str) -> str:
        """Cleaned text that nothing to come can change."""
        self._raw += raw
        cut = _settled(self._raw)
        settled, self._raw = self._raw[:cut], self._raw[cut:]
        return clean_up(settled)

    @property
    def rest(self) -> str:
        """What is held back, cleaned as if the text ended here."""
        return clean_up(self._raw)


def _settled(raw: str) -> int:
    """The last place where no spaced form can reach across: in front of a space, and behind no beginning of a form.

    Every form begins with a space; the only one with a second space, " ' ", may close up to the middle of another one.
    """
    at = len(raw)
    while (at := raw.rfind(" ", 0, at)) > 0:
        if not raw.endswith((" ", " '", " n"), 0, at):
            return at
    return 0
