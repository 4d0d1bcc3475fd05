"""What each token adds to a text, over tokenizers of every kind."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from framework.errors import CheckpointError
from framework.pieces import pieces_of
from framework.tokenizer import Tokenizer

from .backends import MAKERS, made

NAMES = [name for name in MAKERS if not made(name).clean_up_spaces]


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_those_of_the_whole_however_they_are_asked_for(name):
    tokenizer = made(name)
    ids = tokenizer.encode("the quick fox 'é' 😀")
    whole = tokenizer.pieces.join(ids, None)
    assert whole.decode() == tokenizer.decode(ids, skip_special_tokens=False)
    single = [tokenizer.pieces.join([i], previous) for i, previous in zip(ids, [None, *ids[:-1]], strict=True)]
    assert b"".join(single) == whole


@pytest.mark.parametrize("name", NAMES)
def test_ids_without_a_token_add_nothing(name):
    tokenizer = made(name)
    the, beyond = tokenizer.encode("the")[0], tokenizer.vocab_size + 5
    assert not tokenizer.pieces.has(beyond) and tokenizer.pieces.has(the)
    for previous in (None, the):
        assert tokenizer.pieces.join([beyond, the, beyond], previous) == tokenizer.pieces.join([the], previous)
        assert tokenizer.pieces.join([beyond], previous) == b""


def test_a_byte_token_is_its_byte_and_a_letter_is_not_mistaken_for_one():
    tokenizer = made("byte_fallback")
    assert [tokenizer.pieces.join([tokenizer.token_to_id(t)], 5) for t in ("<0xE2>", "<0x41>", "é", "▁the")] == [
        b"\xe2", b"A", "é".encode(), b" the",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])], ids=repr
)
def test_decoder_that_cannot_go_token_by_token_is_refused_at_once(decoder):
    backend = Backend(models.WordLevel({"a": 0}, "a"))
    backend.decoder = decoder
    with pytest.raises(
        CheckpointError, match=r"decoder \(.*\) is of a kind whose text cannot be made a token at a time"
    ):
        Tokenizer(backend, {})


def test_a_decoder_that_stands_alone_or_in_a_sequence_is_the_same():
    backend = MAKERS["byte_level"]()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ids = backend.encode("the é 😀").ids
    assert pieces_of(backend).join(ids, None).decode() == "the é 😀"
