"""The requests of a point: prompts of their lengths, as token ids and as text, groups of equal beginnings among them.

The same options and salt give the same requests. What no two passes share is the beginning, so that the server's prefix
cache holds what a pass itself put there and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framework.runs.bench.serve.lengths import draw_lengths

if TYPE_CHECKING:
    from framework.runs.bench.serve.options import LoadOptions

STREAM, SALT_STREAM = 3, 4
NUM_SALTED = 2
"""Tokens at the beginning of a prompt that follow from salt and pass."""
_TEXT = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent"""
WORDS = tuple(_TEXT.split())
"""Common words, each one token after a space in most vocabularies: as many words are about as many tokens."""


@dataclass(frozen=True)
class Ask:
    """One request: `token_ids` of the prompt, or as many words where the server takes no ids."""

    index: int
    token_ids: tuple[int, ...]
    output_len: int
    seed: int

    @property
    def text(self) -> str:
        return " ".join(WORDS[token % len(WORDS)] if at else f"{token}:" for at, token in enumerate(self.token_ids))


class Prompts:
    """Requests of a workload; `asks(number)` are those of pass `number`, which differ in their beginnings alone."""

    def __init__(self, options: LoadOptions, salt: int) -> None:
        self._salt, self._seed, self._range = salt, options.seed, options.token_ids
        inputs, self._output_lens = draw_lengths(options)
        rng = np.random.default_rng([options.seed, STREAM])
        prefixes = [self._draw(rng, options.shared_prefix_len) for _ in range(options.num_shared_prefixes)]
        self._groups = [index % len(prefixes) if options.shared_prefix_len else index for index in range(len(inputs))]
        self._prompts = [
            [*(prefixes[group] if options.shared_prefix_len else ()), *self._draw(rng, length)]
            for group, length in zip(self._groups, inputs, strict=True)
        ]

    def asks(self, number: int) -> list[Ask]:
        starts = self._starts(number)
        return [
            Ask(index, (*starts[group], *prompt[NUM_SALTED:])[: len(prompt)], output_len, self._seed + index)
            for index, (group, prompt, output_len) in enumerate(
                zip(self._groups, self._prompts, self._output_lens, strict=True)
            )
        ]

    @property
    def max_len(self) -> tuple[int, int]:
        """(tokens in, tokens out) of the request that has the most of both together."""
        pairs = zip(map(len, self._prompts), self._output_lens, strict=True)
        return max(pairs, key=sum)

    def _starts(self, number: int) -> list[tuple[int, ...]]:
        """First tokens of each group: one id apart for neighbours, from a place that is the pass's own."""
        low, high = self._range
        span, count = high - low, max(self._groups) + 1
        first = int(np.random.default_rng([self._salt, number, SALT_STREAM]).integers(0, span**NUM_SALTED))
        numbers = [(first + group) % span**NUM_SALTED for group in range(count)]
        return [tuple(low + number // span**place % span for place in range(NUM_SALTED)) for number in numbers]

    def _draw(self, rng: np.random.Generator, count: int) -> list[int]:
        low, high = self._range
        return rng.integers(low, high, count).tolist()
