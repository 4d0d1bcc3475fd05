"""The incremental detokenizer over a byte-level vocabulary, where one character may take four tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from framework.engine.detokenizer import Detokenizer

SPECIAL = 256


class Bytes:
    """Token i is byte i; token 256 is special."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        out = b""
        for i in token_ids:
            out += bytes([i]) if i < SPECIAL else b"" if skip_special_tokens else b"<s>"
        return out.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_pieces_concatenate_to_the_text_and_hold_no_half_character(text: str, cuts: list[int]) -> None:
    ids = list(text.encode("utf-8", errors="ignore"))
    whole = bytes(ids).decode("utf-8")
    detokenizer, pieces, at = Detokenizer(Bytes(), True), [], 0
    for size in cuts:
        pieces.append(detokenizer.add(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.add(ids[at:], final=True))
    assert "".join(pieces) == whole == detokenizer.text
    assert "�" not in "".join(pieces) or "�" in whole


def test_an_unfinished_character_is_given_out_at_the_end_only() -> None:
    detokenizer = Detokenizer(Bytes(), True)
    first, second = "é".encode()
    assert detokenizer.add([97, first]) == ""
    assert detokenizer.add([second]) == "aé"
    assert detokenizer.add([first]) == ""
    assert detokenizer.add([], final=True) == "�"


def test_special_tokens_are_left_out_or_kept_as_asked() -> None:
    assert Detokenizer(Bytes(), True).add([97, SPECIAL, 98]) == "ab"
    assert Detokenizer(Bytes(), False).add([97, SPECIAL, 98]) == "a<s>b"
