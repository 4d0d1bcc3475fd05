"""Constraints in one spelling, and the bytes of tokens."""

import pytest

from framework import StructuredOutputsParams
from framework.errors import RequestError
from framework.interfaces import GrammarSpec
from framework.structured.spec import spec_of
from framework.structured.vocabulary import read
from framework.tokenizer import Tokenizer

from ..tokenizer.backends import made as tokenizer_of
from .crafted import END, PADDING, SPECIAL, STOP, byte_tokenizer, ids_of


@pytest.mark.parametrize(
    ("asked", "spec"),
    [
        ({"json": {"b": 1, "a": "é"}}, ("json", '{"b": 1, "a": "é"}')),
        ({"json": ' {"b":1,"a":"\\u00e9"}'}, ("json", '{"b": 1, "a": "é"}')),
        ({"json_object": True}, ("json_object", "")),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": ["ja", "nein"]}, ("choice", '["ja", "nein"]')),
        ({"grammar": "root ::= x"}, ("grammar", "root ::= x")),
        ({"structural_tag": {"format": {}}}, ("structural_tag", '{"format": {}}')),
    ],
)
def test_equal_constraints_are_equal_specs_whatever_their_form(asked, spec):
    assert spec_of(StructuredOutputsParams(**asked)) == GrammarSpec(*spec)


@pytest.mark.parametrize("bad", ['{"type": ', {"type": {1, 2}}, {"const": float("nan")}])
def test_what_is_no_json_is_refused_by_name(bad):
    with pytest.raises(RequestError, match=r"structured_outputs\.json=.* cannot be read as JSON"):
        spec_of(StructuredOutputsParams(json=bad))


def test_tokens_are_bytes_and_special_tokens_eos_and_padding_none():
    tokenizer = Tokenizer(byte_tokenizer(), {})
    size = tokenizer.vocab_size + PADDING
    eos = tokenizer.token_to_id("ab")
    vocabulary = read(tokenizer, size, {END, STOP, eos})
    assert b"".join(vocabulary.tokens[: len(SPECIAL)]) == b"" == b"".join(vocabulary.tokens[-PADDING:])
    assert vocabulary.tokens[eos] == b"" and vocabulary.tokens[tokenizer.token_to_id("true")] == b"true"
    assert {t for t in vocabulary.tokens if len(t) == 1} == {bytes([b]) for b in range(256)}
    assert ids_of(vocabulary.existing) == list(range(tokenizer.vocab_size)) and vocabulary.opening is None


def test_byte_fallback_tokens_keep_their_space_but_for_those_at_the_beginning():
    tokenizer = tokenizer_of("byte_fallback")
    vocabulary = read(tokenizer, tokenizer.vocab_size, ())
    the, byte = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("<0xF0>")
    assert vocabulary.tokens[the] == b" the" and vocabulary.tokens[byte] == b"\xf0"
    opening = ids_of(vocabulary.opening)
    assert the not in opening and byte in opening and tokenizer.token_to_id("fox") in opening


@pytest.mark.parametrize("name", ["word_piece", "word_piece_cleaned", "word_ends", "words"])
def test_tokenizer_whose_tokens_depend_on_their_neighbours_is_refused(name):
    tokenizer = tokenizer_of(name)
    with pytest.raises(RequestError, match="depends on the token before it, which no grammar can follow"):
        read(tokenizer, tokenizer.vocab_size, ())
