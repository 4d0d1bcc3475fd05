"""Steps with prompts in fixed shapes: their forward pass is compiled once a bucket and serves any split of its tokens.

What stands behind the forward pass, head, sampler and commit, runs piece by piece in the step's own shape. Knows no
device: what compiling means is the backend's affair. Called by the model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from framework.interfaces import Bucket


AT_START = 512
"""Buckets of at most so many tokens are made at start-up, and the largest. Others wait until a step needs one: that
takes as long as two steps that run piece by piece."""


class Forward:
    """A compiled forward pass. It gives the hidden states [L, H] of the rows that sample, in the same memory each time.

    compile_  what makes of a step, which leaves its value here, one that is run again and again
    """

    def __init__(self, forward: Callable[[], Tensor], compile_: Callable[[Callable[[], None]], Callable[[], None]]):
        self._forward = forward
        self._hidden: Tensor
        self._run = compile_(self._keep)

    def _keep(self) -> None:
        self._hidden = self._forward()

    def __call__(self) -> Tensor:
        self._run()
        return self._hidden


class RaggedSteps:
    """Forward passes by bucket, each made when it is first asked for.

    A bucket of as many tokens as requests is left out: whether every row has one token has to be seen by the shape.
    """

    def __init__(self, buckets: Sequence[Bucket], make: Callable[[Bucket], Forward]) -> None:
        self._buckets = sorted((b for b in buckets if b.tokens != b.requests), key=lambda bucket: bucket.tokens)
        self._make = make
        self._made: dict[Bucket, Forward] = {}

    @property
    def at_start(self) -> list[Bucket]:
        """What to make at start-up, largest first: what a smaller one needs is there then."""
        return self._buckets[-1:] + [bucket for bucket in self._buckets[-2::-1] if bucket.tokens <= AT_START]

    def bucket(self, num_tokens: int, num_rows: int) -> Bucket | None:
        """The smallest bucket that holds such a step; None when there is none."""
        fits = (b for b in self._buckets if b.tokens >= num_tokens and b.requests >= num_rows)
        return next(fits, None)

    def forward(self, bucket: Bucket) -> Forward:
        """What runs a step of the bucket."""
        made = self._made.get(bucket)
        if made is None:
            made = self._made[bucket] = self._make(bucket)
        return made
