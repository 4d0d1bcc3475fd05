"""Logprobs in the JSON of completions and of chats. A masked token's is null: -infinity is no JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from framework.request import Logprob

if TYPE_CHECKING:
    from framework.tokenizer import Tokenizer

Entry = Mapping[int, Logprob] | None
"""Of one token: its own logprob first, then others. None for the first token of a prompt."""


def finite(value: float) -> float | None:
    """A number of JSON, or null."""
    return value if math.isfinite(value) else None


def token_text(token_id: int, logprob: Logprob | None = None, tokenizer: Tokenizer | None = None) -> str:
    """A token's text; `token_id:7` of a model without a tokenizer."""
    text = logprob.decoded_token if logprob is not None else None
    if text is None and tokenizer is not None:
        text = tokenizer.decode_token(token_id)
    return f"token_id:{token_id}" if text is None else text


class CompletionLogprobs:
    """Lists of `/v1/completions`: tokens, token_logprobs, top_logprobs, text_offset.

    tells_others  whether top_logprobs are told: of several tokens with one text the likeliest. Else it is null
    offset        characters before the first token of the next call
    """

    def __init__(self, tokenizer: Tokenizer | None, *, tells_others: bool) -> None:
        self._tells_others, self._tokenizer, self.offset = tells_others, tokenizer, 0

    def of(self, token_ids: Sequence[int], entries: Iterable[Entry]) -> dict[str, Any]:
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            own = None if entry is None else entry[token_id]
            text = token_text(token_id, own, self._tokenizer)
            made["tokens"].append(text)
            made["token_logprobs"].append(None if own is None else finite(own.logprob))
            made["top_logprobs"].append(None if entry is None else _best_texts(entry))
            made["text_offset"].append(self.offset)
            self.offset += len(text)
        return made if self._tells_others else {**made, "top_logprobs": None}


def _best_texts(entry: Mapping[int, Logprob]) -> dict[str, float | None]:
    best: dict[str, float] = {}
    for token_id, one in entry.items():
        text = token_text(token_id, one)
        best[text] = max(best.get(text, -math.inf), one.logprob)
    return {text: finite(value) for text, value in best.items()}


def chat_logprobs(token_ids: Sequence[int], entries: Iterable[Entry], k: int | None) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry a token, with the k best; None: with all that there are."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert entry is not None, "a generated token without logprobs"
        # The token itself stands first, and is one of the best only where its rank says so.
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[:k]
        content.append(
            {**_chat_entry(token_id, entry[token_id]), "top_logprobs": [_chat_entry(*one) for one in ranked]}
        )
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, one: Logprob) -> dict[str, Any]:
    text = token_text(token_id, one)
    return {"token": text, "logprob": finite(one.logprob), "bytes": list(text.encode())}


def prompt_logprobs(entries: Sequence[Entry]) -> list[Any]:
    """Our own field `prompt_logprobs`: {token id: {logprob, rank, decoded_token}} a token, null for the first."""
    return [None if entry is None else {str(i): _plain(one) for i, one in entry.items()} for entry in entries]


def _plain(one: Logprob) -> dict[str, Any]:
    return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
