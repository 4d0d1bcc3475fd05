"""Padded steps of decodes: which bucket a step runs in, and the executables that serve it.

A backend that names buckets compiles a step once a bucket and a variant of the sampler, and runs it again for other
requests. Knows no device: what compiling means is the backend's affair. Called by the model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.batch import NULL_BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.batch import SchedulerOutput
    from framework.interfaces import Bucket
    from framework.sampling.captured import CapturedSampler, Variant

Executable = Callable[[], Any]


class PaddedSteps:
    """Executables by bucket and variant, made when a step first needs one or in `warm_up`.

    make  (bucket, variant) -> executable; variant None is the forward pass alone, up to the logits
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        captured: CapturedSampler | None,
        make: Callable[[Bucket, Variant | None], Executable],
    ) -> None:
        self._buckets = sorted(buckets, key=lambda bucket: bucket.requests)
        self._captured, self._make = captured, make
        self.plain = None if captured is None else captured.plain()
        """Of a step whose rows draw at some temperature."""
        self._made: dict[Bucket, dict[Variant | None, Executable]] = {bucket: {} for bucket in self._buckets}

    def bucket(self, num_rows: int) -> Bucket | None:
        """The smallest bucket for so many decodes; None when there is none."""
        return next((bucket for bucket in self._buckets if bucket.requests >= num_rows), None)

    def with_logits(self, bucket: Bucket) -> Bucket:
        """The bucket in which a forward pass runs alone: one of few, because each keeps memory for its logits."""
        wanted = 1 << (bucket.requests - 1).bit_length()
        return next((one for one in self._buckets if one.requests >= wanted), self._buckets[-1])

    def variant(self, req_idx: NDArray[np.int32]) -> Variant | None:
        """What the sampler has to do for these rows inside of the executable; None for rows sampled behind it."""
        return None if self._captured is None else self._captured.variant(req_idx)

    def executable(self, bucket: Bucket, variant: Variant | None) -> Executable:
        """One that serves the variant. What is made stays.

        The first step that needs a variant makes it for every bucket: one wait then, and none while requests come and
        go. Where the sampler runs behind the executable it is made for the step's bucket alone.
        """
        found = self._made[bucket].get(variant)
        if found is None:
            for one in self.largest_first if variant is not None else (bucket,):
                self._replace(one, variant)
            found = self._made[bucket][variant]
        return found

    def warm_up(self, bucket: Bucket) -> None:
        """Makes the executable of a plain step."""
        self._replace(bucket, self.plain)

    @property
    def likely(self) -> list[Variant]:
        """Variants beside the plain one that requests often ask for."""
        return [] if self._captured is None else self._captured.likely()

    @property
    def largest_first(self) -> list[Bucket]:
        """The order in which buckets are made: what a smaller one needs is there then."""
        return self._buckets[::-1]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def _replace(self, bucket: Bucket, variant: Variant | None) -> None:
        """Makes the executable of a variant and forgets those of pools that have moved."""
        made = self._made[bucket]
        if self._captured is not None:
            for old in [v for v in made if v is not None and not self._captured.is_current(v)]:
                del made[old]
        if variant not in made:
            made[variant] = self._make(bucket, variant)


def entered_blocks(scheduled: SchedulerOutput, block_sizes: Sequence[int]) -> list[NDArray[np.int32]] | None:
    """[groups][R] the block that each row of a step of decodes enters with it, NULL_BLOCK for none.

    None when the step brings other blocks than those, as for requests that arrive.
    """
    rows, entered = scheduled.rows, []
    for delta, size in zip(scheduled.new_block_ids, block_sizes, strict=True):
        blocks = np.full(len(rows), NULL_BLOCK, np.int32)
        if delta.at is not None:
            blocks[delta.at] = delta.ids
        elif len(delta.rows):
            at = _places(rows, delta.rows)
            is_one_each = len(delta.ids) == len(delta.rows) and at is not None
            if not is_one_each or (delta.starts != scheduled.num_computed_tokens[at] // size).any():
                return None
            blocks[at] = delta.ids
        entered.append(blocks)
    return entered


def _places(rows: NDArray[np.int32], wanted: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Index in rows of each of the wanted, all different; None when one is not there."""
    place = np.full(int(max(rows.max(), wanted.max())) + 1, -1)
    place[rows] = np.arange(len(rows))
    at = place[wanted]
    return None if (at < 0).any() else at
