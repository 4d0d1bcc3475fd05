"""A small automaton by hand, against which the masks of a grammar are held token by token."""

from __future__ import annotations

import numpy as np

from framework.interfaces import GrammarContext

SPECIAL = {256: "<|end|>", 257: "<|tool|>"}
PADDING = 5
_LONGER = [b"12", b"-a", b"a-", b"3-f", b"-ab", b"00000", "é".encode(), b"true", b'{"', b'":', b'"}', b"yes", b"no"]


def context(**changes):
    """All bytes, two special tokens, some longer tokens, and padding."""
    tokens = [bytes([b]) for b in range(256)] + [b"", b""] + _LONGER + [b""] * PADDING
    return GrammarContext(tokens, SPECIAL, lambda text: list(text.encode()), **changes)


class Automaton:
    """[0-9]+(-[a-f]{1,2})? : from each of its states the end can be reached, so that all that is alive is allowed."""

    regex = "[0-9]+(-[a-f]{1,2})?"
    accepting = ("digits", "one", "two")

    def step(self, state, byte):
        """The next state, None for none."""
        letter = chr(byte)
        if state in ("start", "digits") and letter.isascii() and letter.isdigit():
            return "digits"
        if state == "digits" and letter == "-":
            return "dash"
        return {"dash": "one", "one": "two"}.get(state) if letter in "abcdef" else None

    def run(self, state, text):
        for byte in text:
            state = None if state is None else self.step(state, byte)
        return state

    def allowed(self, state, tokens):
        """Ids of the tokens that lead on from the state."""
        return {i for i, text in enumerate(tokens) if text and self.run(state, text) is not None}


def mask_of(matcher, vocab_size):
    """Ids that the matcher allows; the row held something else before."""
    row = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill(row)
    return set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())
