"""Tokenizers out of GGUF headers: the packaged model's facts, and each splitting rule against its own family's."""

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import models as backend_models
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from framework.checkpoint import open_checkpoint
from framework.config import ModelConfig
from framework.errors import CheckpointError
from framework.plugins import registry
from framework.tokenizer import Tokenizer

TEXT = "Hello  World's 12345 naïve cafe\u0301\n\n  don'T 東京٣٤\t— !!\r\n x"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["H e", "l l", "He ll", "Ġ W", "1 2", "12 3", "3 4", "Ċ Ċ", "Ġ Ġ"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<s>", "</s>", "<user>"]
BOS, EOS, USER = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
KEYS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 3) + [3, 3, 4],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
}


@pytest.fixture(scope="module")
def packaged():
    return Tokenizer.of(open_checkpoint(ModelConfig(), "auto", registry())[0])


def test_packaged_ends_are_the_chat_markers(packaged):
    assert packaged.bos_token_id == packaged.token_to_id("<|im_start|>") is not None
    assert packaged.eos_token_id == packaged.token_to_id("<|im_end|>") is not None
    assert packaged.vocab_size == 49152


def test_packaged_text_gets_no_bos_and_markers_are_one_token(packaged):
    assert packaged.encode("Hi") == packaged.encode("Hi", add_special_tokens=False)
    assert packaged.encode("<|im_start|>") == [1]
    assert (
        packaged.decode([1, 2]) == "" and packaged.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
    )


def test_packaged_digits_are_split_singly(packaged):
    ids = packaged.encode("in 2026: 007")
    assert [packaged.decode_token(i) for i in ids] == ["in", " ", "2", "0", "2", "6", ":", " ", "0", "0", "7"]


@pytest.mark.parametrize("text", ["naïve café", "東京 \U0001f600 \u0301x", "a\n\n  b\t", "\x00\x7f", "١٢٣ ½"])
def test_packaged_text_comes_back_whole(text, packaged):
    assert packaged.decode(packaged.encode(text)) == text


def test_packaged_template_brings_its_own_system_prompt(packaged):
    text = packaged.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    own = packaged.apply_chat_template([{"role": "system", "content": "S"}], add_generation_prompt=False)
    assert own == "<|im_start|>system\nS<|im_end|>\n"


# ---------------------------------------------------------------------------------------------------------- rules


def family(tokenizer_class):
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    return tokenizer_class(vocab=vocabulary, merges=merges, unk_token=None, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(("rule", "oracle"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_rule_cuts_text_as_its_own_family_does(rule, oracle):
    ours = Tokenizer.load({**KEYS, "tokenizer.ggml.pre": rule})
    assert ours.encode(TEXT) == family(oracle).encode(TEXT, add_special_tokens=False)


def test_llama_bpe_cuts_digits_by_threes_and_takes_whole_words():
    ours = Tokenizer.load({**KEYS, "tokenizer.ggml.pre": "llama-bpe"})
    pattern = (  # as the tokenizer.json of Llama 3 has it
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    oracle = Backend(backend_models.BPE({token: i for i, token in enumerate(TOKENS)}, merges, ignore_merges=True))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    assert ours.encode(TEXT) == oracle.encode(TEXT).ids
    # "1234" is cut to "123" and "4" before any merge, so the merge of "3 4" never applies.
    assert [ours.decode_token(i) for i in ours.encode("1234")] == ["123", "4"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, []), ({"bos": True}, [BOS]), ({"bos": False, "eos": True}, [EOS]), ({"bos": True, "eos": True}, [BOS, EOS])],
)
def test_ends_are_added_only_when_the_header_says_so(keys, expected):
    header = {f"tokenizer.ggml.add_{role}_token": value for role, value in keys.items()}
    ours = Tokenizer.load({**KEYS, **header})
    assert [i for i in ours.encode("He") if i in (BOS, EOS)] == expected
    assert ours.encode("He", add_special_tokens=False) == [TOKENS.index("He")]


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    ours = Tokenizer.load(KEYS)
    assert ours.encode("<s><user>") == [BOS, USER]
    assert ours.decode([BOS, USER, EOS]) == "<user>"


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"tokenizer.ggml.pre='tekken' is not a known splitting rule \(known: gpt-2, sm",
        ),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre=None is not a known splitting rule"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama' is not read from GGUF"),
        ({"tokenizer.ggml.merges": None}, "the GGUF header has no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["He zz"]}, "tokenizer.ggml.merges does not fit the tokens"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "He"]}, "tokenizer.ggml.tokens: 1 stand there twice"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "tokenizer.ggml.bos_token_id=9999 is outside of the"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "asks for add_bos_token but names no bos token",
        ),
    ],
)
def test_what_is_not_known_or_does_not_fit_is_refused_by_name(edits, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load({**KEYS, **edits})
