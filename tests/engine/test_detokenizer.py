"""Incremental text: over tokenizers of every kind, whatever the steps, it is the text that a whole decode gives."""

import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint import open_checkpoint
from framework.config import ModelConfig
from framework.engine.detokenizer import Detokenizer
from framework.plugins import registry
from framework.tokenizer import Tokenizer

from ..tokenizer.backends import MAKERS, made

REPLACEMENT = "\ufffd"
PLACES = ("aeo thx.'", "éüñ", "東京नमस्ते", "😀👩\u200d👧🏽", "\u0301\u0308\u200b\n\t ")


def random_texts(count, seed):
    """Texts of letters, marks, scripts and emoji of several code points, valid Unicode throughout."""
    rnd = random.Random(seed)

    def letter():
        if rnd.random() < 0.8:
            return rnd.choice(rnd.choice(PLACES))
        code = rnd.randrange(0x20, 0x30000)
        return "x" if unicodedata.category(chr(code)) in ("Cs", "Cn") else chr(code)

    return ["".join(letter() for _ in range(rnd.randint(1, 24))) for _ in range(count)]


def stream(detokenizer, ids, rnd):
    """Pieces of text for steps of one to three tokens; the last one is what `finish` gives."""
    pieces, at = [], 0
    while at < len(ids):
        size = rnd.randint(1, 3)
        pieces.append(detokenizer.add(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_pieces_of_200_texts_concatenate_to_the_whole_decode(name, skip):
    tokenizer, rnd = made(name), random.Random(3)
    for text in random_texts(200, seed=len(name)):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        pieces = stream(Detokenizer(tokenizer, skip), ids, rnd)
        assert "".join(pieces) == whole, text
        if name in ("byte_level", "byte_fallback"):
            assert whole == text
            assert REPLACEMENT not in "".join(pieces)


def test_pieces_of_200_texts_of_the_default_model_concatenate_to_them():
    checkpoint, _ = open_checkpoint(ModelConfig(), "auto", registry())
    tokenizer, rnd = Tokenizer.of(checkpoint), random.Random(4)
    for text in random_texts(200, seed=1):
        ids = tokenizer.encode(text)
        pieces = stream(Detokenizer(tokenizer, True), ids, rnd)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_pieces_of_random_ids_concatenate_to_the_whole_decode(name, skip):
    tokenizer, rnd = made(name), random.Random(7)
    for _ in range(200):
        ids = [rnd.randrange(tokenizer.vocab_size + 2) for _ in range(rnd.randint(0, 12))]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        got = "".join(stream(Detokenizer(tokenizer, skip), ids, rnd))
        if name != "byte_fallback" or REPLACEMENT not in whole:
            assert got == whole, ids
        else:  # there a broken character costs all characters beside it that are spelled in bytes
            assert got.count(REPLACEMENT) <= whole.count(REPLACEMENT)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=16), cuts=st.lists(st.integers(1, 5), max_size=16))
def test_no_byte_of_a_character_is_given_out_before_it_is_whole(data, cuts):
    tokenizer = made("byte_level")
    ids = [tokenizer.token_to_id(letter) for letter in _spelled(data)]
    detokenizer, at, shown = Detokenizer(tokenizer, True), 0, ""
    for size in cuts:
        shown += detokenizer.add(ids[at : at + size])
        at += size
        assert data.decode("utf-8", "replace").startswith(shown)
    assert shown + detokenizer.add(ids[at:]) + detokenizer.finish() == data.decode("utf-8", "replace")


def _spelled(data):
    tokenizer = made("byte_level")
    by_byte = {tokenizer.pieces.join([i], None): i for i in range(3, 259)}
    return [tokenizer._backend.id_to_token(by_byte[bytes([byte])]) for byte in data]


def test_letters_before_an_unfinished_character_are_not_held_back():
    tokenizer = made("byte_level")
    a, c3, a9 = (tokenizer.token_to_id(letter) for letter in "aÃ©")
    detokenizer = Detokenizer(tokenizer, True)
    assert [detokenizer.add([a, c3]), detokenizer.add([a9]), detokenizer.add([c3]), detokenizer.finish()] == [
        "a", "é", "", REPLACEMENT,
    ]  # fmt: skip


def test_bytes_that_never_become_a_character_are_replaced_as_soon_as_that_is_known():
    tokenizer = made("byte_fallback")
    e2, a = tokenizer.token_to_id("<0xE2>"), tokenizer.token_to_id("a")
    detokenizer = Detokenizer(tokenizer, True)
    assert [detokenizer.add([e2]), detokenizer.add([e2]), detokenizer.add([a])] == ["", REPLACEMENT, REPLACEMENT + "a"]


def test_cost_is_that_of_the_new_tokens():
    tokenizer, asked = made("metaspace"), []

    class Counting:
        pieces = tokenizer.pieces
        special_ids = tokenizer.special_ids
        clean_up_spaces = False

    class Pieces:
        def join(self, token_ids, previous):
            asked.append(len(token_ids))
            return tokenizer.pieces.join(token_ids, previous)

        has = staticmethod(tokenizer.pieces.has)
        looks_back = True

    vocabulary = Counting()
    vocabulary.pieces = Pieces()
    detokenizer = Detokenizer(vocabulary, True)
    for _ in range(500):
        detokenizer.add([0, 7])
    assert asked == [1] * 500  # the special token is not asked for
