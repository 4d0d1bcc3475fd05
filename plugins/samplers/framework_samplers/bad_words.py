"""Stage `bad_words`: sequences of tokens that a request must not generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.errors import shown
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.history import tokens_before
from framework_samplers.token_ids import check_ids

MAX_TOKENS = 8192
"""Tokens that all words of a request may have together: how many words and how long is up to the request."""

SOMETHING = "\n"
"""What a word may follow: it merges with no word, and no tokenizer puts a space behind it."""

Words = Sequence[tuple[int, ...]]


class BadWords:
    """Masks the last token of a word whose earlier tokens were just generated; a word of one token always.

    Tokens of the prompt match nothing. A string stands for all of its spellings, with a leading space and without.
    A row lists the tokens of all its words one behind the other. Of each it knows how far before the drawn token it
    must stand, 0 for the last one of a word, and the place of that last one, where mismatches are counted.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "bad_words",
        kind="mask",
        fields=(
            Field("count", "int32"),
            Field("first", "int32"),
            Field("ids", "int32", MAX_TOKENS, pooled=True),
            Field("distance", "int32", MAX_TOKENS, init=-1, pooled=True),
            Field("end", "int32", MAX_TOKENS, pooled=True),
        ),
        params=("bad_words", "bad_words_token_ids"),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "drafts", "batch_invariant", "deterministic"})),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._count, self._first = ctx.column("count"), ctx.column("first")
        self._listed = tuple(ctx.column(name) for name in ("ids", "distance", "end"))
        self._token_ids, self._vocab_size = ctx.token_ids, ctx.vocab_size
        self._encode = ctx.encode
        self._spelled = lru_cache(64)(self._spell)  # admission asks twice, and a deployment has few lists

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.bad_words or params.bad_words_token_ids)

    def validate(self, params: SamplingParams) -> None:
        check_ids("bad_words_token_ids", chain.from_iterable(params.bad_words_token_ids or ()), self._vocab_size)
        count = sum(map(len, self.words(params)))
        if count > MAX_TOKENS:
            name = "bad_words" if params.bad_words else "bad_words_token_ids"
            raise ValueError(
                f"{name} and their spellings have {count} tokens and at most {MAX_TOKENS} are possible; pass fewer"
            )

    def words(self, params: SamplingParams) -> Words:
        """The words as token ids, without repeats. ValueError for a string that cannot be made of tokens."""
        spelled = self._spelled(params.bad_words) if params.bad_words else ()
        return tuple(dict.fromkeys((*spelled, *(params.bad_words_token_ids or ()))))

    def forbidden_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that are never drawn, whatever was generated: the words of one token."""
        return frozenset(word[0] for word in self.words(params) if len(word) == 1)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        words = self.words(params)
        lengths = np.array([len(word) for word in words])
        ends = lengths.cumsum() - 1
        end = np.repeat(ends, lengths)
        count = len(end)
        self._count.np[req_idx], self._first.np[req_idx] = count, request.num_prompt_tokens
        listed = (list(chain.from_iterable(words)), end - np.arange(count), end)
        for column, values in zip(self._listed, listed, strict=True):
            column.take(req_idx)[:count] = values

    def apply(self, logits: Tensor, rows: Rows) -> None:
        most = int(self._count.np[rows.req_idx_np].max(initial=0))
        ids, distance, end = (c.dev[c.slot[rows.req_idx], :most].long() for c in self._listed)
        before = tokens_before(self._token_ids, rows, distance, self._first.dev[rows.req_idx].long())
        misses = ((before != ids) & (distance > 0)).int()
        misses = torch.zeros_like(misses).scatter_add_(1, end, misses)
        # The lesser of a logit and +inf is the logit, bit for bit: that is what all but complete words give.
        bound = torch.where((distance == 0) & (misses == 0), -torch.inf, torch.inf)
        logits.scatter_reduce_(1, ids, bound, "amin")

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens but what stands before a row, which the context brings."""

    def _spell(self, words: tuple[str, ...]) -> Words:
        if self._encode is None:
            raise ValueError(
                f"bad_words={shown(list(words))} needs text, and the model has no tokenizer; use bad_words_token_ids"
            )
        return list(chain.from_iterable(self._ids_of(word) for word in words))

    def _ids_of(self, word: str) -> Words:
        assert self._encode is not None, "checked by the caller"
        found = [ids for ids in spellings(word, self._encode) if ids]
        if not found:
            raise ValueError(f"bad_words holds {shown(word)}, of which the tokenizer makes no token; leave it out")
        check_ids(f"bad_words: {shown(word)}", chain.from_iterable(found), self._vocab_size)
        return found


def spellings(word: str, encode: Callable[[str], Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Token ids of a word with a leading space and without, each as it begins a text and as it follows something.

    Tokenizers that put a space before every text spell these differently: what follows something is cut out of a text.
    """
    bare = word.lstrip(" ")
    before = tuple(encode(SOMETHING))
    for text in (bare, f" {bare}") if bare else (word,):
        yield tuple(encode(text))
        behind = tuple(encode(SOMETHING + text))
        if behind[: len(before)] == before:
            yield behind[len(before) :]
