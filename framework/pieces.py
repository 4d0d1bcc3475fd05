"""Which bytes each token adds to a text: what text is made of a token at a time, exactly and at a cost of its own size.

A token's bytes follow from the tokenizer's decoder, from the token, and from whether something stands before it. Which
tokens are asked for, and what becomes of bytes that are no whole character, is the caller's part
(`engine.detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tokenizers

from framework.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces(Protocol):
    """Bytes of tokens in the order of a text. looks_back: whether `previous` counts."""

    looks_back: bool

    def join(self, token_ids: Sequence[int], previous: int | None) -> bytes:
        """What `token_ids` add to a text whose last token is `previous`, None at its beginning.

        Ids without a token add nothing, and are no `previous` either.
        """

    def has(self, token_id: int) -> bool:
        """Whether the vocabulary has a token of this id: a model's may be padded beyond it."""


def pieces_of(backend: tokenizers.Tokenizer) -> Pieces:
    """The pieces of a tokenizer. CheckpointError for a decoder whose tokens depend on more than one neighbour."""
    kinds = _kinds(backend.decoder)
    if "CTC" in kinds or ("ByteLevel" in kinds and kinds - {"ByteLevel", "Fuse"}):
        raise CheckpointError(
            f"the tokenizer's decoder ({', '.join(sorted(kinds))}) is of a kind whose text cannot be made a token at a "
            "time. Set model.tokenizer to a folder with another tokenizer.json."
        )
    if "ByteLevel" in kinds:
        return ByteLevelPieces(backend)
    if "ByteFallback" in kinds:
        return FallbackPieces(backend)
    return NeighbourPieces(backend)


def _kinds(decoder: Any) -> set[str]:
    """Names of the decoder's parts; none for a tokenizer that has no decoder and joins its tokens by spaces."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


class _Known:
    looks_back = True

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def has(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None


class ByteLevelPieces(_Known):
    """Every token is a run of bytes, whatever stands beside it: the alphabet of GPT-2 spells each byte by a letter."""

    looks_back = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self._bytes = _Lazily(self._spell)

    def join(self, token_ids: Sequence[int], previous: int | None) -> bytes:
        return b"".join(map(self._bytes.__getitem__, token_ids))

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        # A token with a letter outside of the alphabet was added by hand and means itself.
        spelled = [_BYTE_OF.get(letter) for letter in token]
        return token.encode() if None in spelled else bytes(spelled)  # type: ignore[arg-type]  # None is excluded


class FallbackPieces(_Known):
    """Tokens are text, and `<0x..>` is a byte of a character that the vocabulary lacks."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self._first = _Lazily(self._alone)
        self._later = _Lazily(self._behind)
        # A token for others to stand behind: the decoder strips a space from the beginning of a text alone.
        self._front = next((i for i in range(backend.get_vocab_size()) if self._alone(i).isalnum()), None)

    def join(self, token_ids: Sequence[int], previous: int | None) -> bytes:
        if previous is not None or not token_ids:
            return b"".join(map(self._later.__getitem__, token_ids))
        count = next((n for n, i in enumerate(token_ids) if self.has(i)), len(token_ids) - 1)
        return self._first[token_ids[count]] + b"".join(map(self._later.__getitem__, token_ids[count + 1 :]))

    def _alone(self, token_id: int) -> bytes:
        return self._byte(token_id) or self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _behind(self, token_id: int) -> bytes:
        byte = self._byte(token_id)
        if byte or self._front is None:
            return byte or self._alone(token_id)
        pair = self._backend.decode([self._front, token_id], skip_special_tokens=False).encode()
        return pair[len(self._alone(self._front)) :]

    def _byte(self, token_id: int) -> bytes:
        """The byte of a byte token that is part of a longer character, else nothing: ASCII has text of its own."""
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        value = int(match[1], 16) if match else 0
        return bytes([value]) if value >= 0x80 else b""


class NeighbourPieces(_Known):
    """Tokens are text that depends on the token before them: a space in between, a prefix that means none."""

    def join(self, token_ids: Sequence[int], previous: int | None) -> bytes:
        return "".join(self._each(token_ids, previous)).encode()

    def _each(self, token_ids: Sequence[int], previous: int | None) -> Iterator[str]:
        decode = self._backend.decode
        for token_id in filter(self.has, token_ids):
            before = "" if previous is None else decode([previous], skip_special_tokens=False)
            pair = [token_id] if previous is None else [previous, token_id]
            yield decode(pair, skip_special_tokens=False)[len(before) :]
            previous = token_id


class _Lazily(dict[int, bytes]):
    """{token id: bytes}, each worked out when it is first asked for."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        made: bytes = self._make(token_id)
        self[token_id] = made
        return made


def _alphabet() -> dict[str, int]:
    """{letter: byte}: printable bytes are themselves, the others stand from U+0100 on in their order.

    Source: openai/gpt-2, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + place): b for place, b in enumerate(others)}


_BYTE_OF = _alphabet()
