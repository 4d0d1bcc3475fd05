"""The vocabulary in a GGUF header as a `tokenizers.Tokenizer`. Which file it came from is not known here.

Only byte-level BPE with a known splitting rule is built; any other model or rule is refused by name, since a wrong rule
would cut text into other tokens without a sign. Called by `framework.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from framework.errors import CheckpointError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Rule:
    """How text is split before BPE.

    split          regular expression whose matches are the pieces; None = GPT-2's own
    single_digits  every digit is cut out first
    nfc            text is composed first
    whole_words    a piece that is in the vocabulary is one token, whatever the merges say
    """

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False


_RULES = {
    "gpt-2": _Rule(),
    "smollm": _Rule(single_digits=True),
    "llama-bpe": _Rule(split=_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True),
    "qwen2": _Rule(split=_WORDS + r"\p{N}" + _REST, nfc=True),
}


def build(keys: Mapping[str, Any]) -> Tokenizer:
    """Tokenizer of the `tokenizer.*` keys of a GGUF header.

    Adds bos or eos to an encoded text only when the header says so. Raises CheckpointError for a missing key and for a
    tokenizer model or a `tokenizer.ggml.pre` that is not known.
    """
    if keys.get("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"tokenizer.ggml.model={keys.get('tokenizer.ggml.model')!r} is not read from GGUF, 'gpt2' (byte-level BPE) "
            "is. Set model.tokenizer to a folder with a tokenizer.json."
        )
    rule = _rule(keys)
    tokens = _required(keys, "tokenizer.ggml.tokens")
    merges = [_merge(text) for text in _required(keys, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(_bpe(tokens, merges, rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(rule)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, _types(keys, len(tokens)))
    _add_ends(tokenizer, keys, tokens)
    return tokenizer


def token_of(keys: Mapping[str, Any], role: str) -> str | None:
    """Text of the `bos`, `eos`, `unknown` or `padding` token, None when the header names none."""
    token_id = keys.get(f"tokenizer.ggml.{role}_token_id")
    tokens = keys.get("tokenizer.ggml.tokens", [])
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{role}_token_id={token_id} is outside of the {len(tokens)} tokens. Convert it again."
        )
    return str(tokens[token_id])


def _rule(keys: Mapping[str, Any]) -> _Rule:
    name = keys.get("tokenizer.ggml.pre")
    if name not in _RULES:
        raise CheckpointError(
            f"tokenizer.ggml.pre={name!r} is not a known splitting rule (known: {', '.join(_RULES)}). "
            "Set model.tokenizer to a folder with a tokenizer.json."
        )
    return _RULES[name]


def _required(keys: Mapping[str, Any], key: str) -> list[str]:
    found = keys.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        what = "has no" if found is None else "holds something else than texts in"
        raise CheckpointError(f"the GGUF header {what} {key}. Set model.tokenizer to a folder with a tokenizer.json.")
    return found


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not space:
        raise CheckpointError(f"tokenizer.ggml.merges holds {text!r}, which is no pair of tokens. Convert it again.")
    return left, right


def _types(keys: Mapping[str, Any], num_tokens: int) -> list[int]:
    """A number a token; a header without them has ordinary tokens only."""
    types = keys.get("tokenizer.ggml.token_type", [_NORMAL] * num_tokens)
    if not isinstance(types, list) or len(types) != num_tokens:
        raise CheckpointError(
            f"tokenizer.ggml.token_type={types!r:.40} must hold a number for each of the {num_tokens} tokens. "
            "Convert it again."
        )
    return types


def _bpe(tokens: list[str], merges: list[tuple[str, str]], whole_words: bool) -> models.BPE:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens: {len(tokens) - len(vocabulary)} stand there twice. Convert it again."
        )
    try:
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    except Exception as error:  # the Rust side raises plain Exception
        raise CheckpointError(f"tokenizer.ggml.merges does not fit the tokens ({error}). Convert it again.") from error


def _splitter(rule: _Rule) -> pre_tokenizers.PreTokenizer:
    if rule.split is not None:
        by_rule = pre_tokenizers.Split(Regex(rule.split), behavior="isolated")
        return pre_tokenizers.Sequence([by_rule, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in text before it is split: control tokens are special, user-defined ones ordinary."""
    control = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    tokenizer.add_special_tokens(control)
    user = [
        AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED
    ]
    tokenizer.add_tokens(user)


def _add_ends(tokenizer: Tokenizer, keys: Mapping[str, Any], tokens: list[str]) -> None:
    """bos before and eos after an encoded text, as `add_bos_token` and `add_eos_token` say."""
    ends = {role: _end(keys, role) for role in ("bos", "eos") if keys.get(f"tokenizer.ggml.add_{role}_token")}
    if not ends:
        return
    single = [*([ends["bos"]] if "bos" in ends else []), "$A", *([ends["eos"]] if "eos" in ends else [])]
    ids = [(token, tokens.index(token)) for token in dict.fromkeys(ends.values())]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _end(keys: Mapping[str, Any], role: str) -> str:
    token = token_of(keys, role)
    if token is None:
        raise CheckpointError(f"the GGUF header asks for add_{role}_token but names no {role} token. Convert it again.")
    return token
