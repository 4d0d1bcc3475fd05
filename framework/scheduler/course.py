"""Decodes that go on: while the same requests compute a token each, a step follows from the one before it.

Nearly every step of a busy engine is such a one, and it finds the caches full of weights: what it does not do counts.
The scheduler starts a course behind a step of decodes and drops it as soon as a request arrives, leaves or yields.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from framework.batch import BlockOps, SchedulerOutput
from framework.scheduler.ledger import StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from framework.batch import BlockDelta
    from framework.request import Request


class Course:
    """The steps behind `step`, one of decodes in which every running request ran and drew.

    room      steps until one of the requests draws its last token: that step is decided anew
    requests  all running requests, in batch-row order
    """

    def __init__(self, step: StepRecord, block_size: int) -> None:
        self.requests, self._block_size, self._age = step.requests, block_size, 0
        self._last = replace(step.scheduled, new=[], finished=[], preempted=[], aborted=[], block_ops=BlockOps())
        self._generations = step.generations
        self.room = min([r.max_total_tokens - len(r.token_ids) - r.num_in_flight for r in self.requests]) - 1
        # at the age of this index, and then once a block, the request's token is the first of a block
        self._entering: list[list[Request]] = [[] for _ in range(block_size)]
        for request in self.requests:
            self._entering[-request.num_computed_tokens % block_size].append(request)
        sets = chain.from_iterable((r.eos_token_ids, r.stop_token_ids) for r in self.requests)
        self._endings = frozenset().union(*{id(s): s for s in sets}.values())

    @property
    def entering(self) -> Sequence[Request]:
        """Requests that begin a block in the next step."""
        return self._entering[self._age % self._block_size]

    def emit(self, step_id: int, deltas: tuple[BlockDelta, ...]) -> StepRecord:
        """The next step. Moves the requests' optimistic counters on."""
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_in_flight += 1
        self.room -= 1
        self._age += 1
        last = self._last  # nothing arrives or leaves: its empty lists serve again
        self._last = scheduled = SchedulerOutput(
            step_id=step_id,
            rows=last.rows,
            num_scheduled_tokens=last.num_scheduled_tokens,
            num_computed_tokens=last.num_computed_tokens + 1,
            samples=last.samples,
            num_drafts=last.num_drafts,
            new_block_ids=deltas,
            new=last.new,
            finished=last.finished,
            preempted=last.preempted,
            aborted=last.aborted,
            block_ops=last.block_ops,
            only_decodes=True,
            goes_on=True,
        )
        # a request that enters a block with the next step fills its last one with this
        return StepRecord(scheduled, self.requests, self._generations, self, self.entering)

    def may_end(self, token_ids: Iterable[int]) -> bool:
        """Whether one of the tokens ends one of the requests; False is certain."""
        return not self._endings.isdisjoint(token_ids)
