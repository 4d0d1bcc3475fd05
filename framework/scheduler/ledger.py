"""Steps between `schedule` and `update`, and what must not be reused before they come back.

A request's own counters are optimistic; this ledger is the committed side. It decides nothing: the scheduler records a
step when it is made and pops it when its result arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from framework.batch import SchedulerOutput
    from framework.request import Request


@dataclass(slots=True)
class Entering:
    """Requests that begin a block in the same steps, once every `block_size` steps.

    at, rows   [n] their batch rows, and their rows of the request table, int32
    columns    [n] int32 block-table column of the block that they begin next
    each       [n] int32 ones
    num_told   committed steps of which they have the tokens already
    upcoming   columns of the blocks behind that one, the next ones last
    untold     blocks of steps that have been made, group by group, which they do not hold yet
    """

    requests: list[Request]
    at: NDArray[np.int32]
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    each: NDArray[np.int32]
    num_told: int = 0
    upcoming: list[NDArray[np.int32]] = field(default_factory=list)
    untold: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class StepRecord:
    """Who runs in a step, in batch-row order.

    generations  `num_preemptions` of each request when the step was made: a request that was preempted since then has
                 another one, and the step's tokens are not its own any more
    course       the `Course` that made the step, to be compared with the one of now; None when it was decided anew
    filling      requests that fill a block with it, None for nobody; known of a step of a course only
    sources      blocks that it copies: held until it comes back
    """

    scheduled: SchedulerOutput
    requests: list[Request]
    generations: list[int]
    course: object | None = None
    filling: Entering | None = None
    sources: Sequence[int] = ()


@dataclass(slots=True)
class Kept:
    """Row and blocks that a request gave up while `step_id`, the last step that names them, is in flight."""

    step_id: int
    row: int
    blocks: list[int]
    lease: int


class Ledger:
    """Steps in flight, oldest first, and what they keep from being reused."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._kept: list[Kept] = []
        self.num_kept_blocks = 0

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: StepRecord) -> None:
        self._steps.append(step)

    def pop(self, scheduled: SchedulerOutput) -> StepRecord:
        """The oldest step, which must be the one that comes back."""
        assert self._steps, f"step {scheduled.step_id} comes back, but no step is in flight"
        oldest = self._steps[0].scheduled.step_id
        assert oldest == scheduled.step_id, f"step {scheduled.step_id} comes back before step {oldest}"
        return self._steps.popleft()

    def last_naming(self, request: Request) -> int | None:
        """Id of the last step in flight in which `request` runs, None when it runs in none."""
        for step in reversed(self._steps):
            if request in step.requests:
                return step.scheduled.step_id
        return None

    def leaves_alone(self, request: Request, num_tokens: int) -> bool:
        """Whether no step in flight computes or loads any of the request's first `num_tokens` tokens."""
        for step in self._steps:
            if request in step.requests:
                start = step.scheduled.num_computed_tokens[step.requests.index(request)]
                if start < num_tokens or any(new.request_id == request.request_id for new in step.scheduled.new):
                    return False
        return True

    def keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        self.num_kept_blocks += len(kept.blocks)

    def release(self, step_id: int) -> list[Kept]:
        """What nobody names any more, now that `step_id` is done."""
        if not self._kept:
            return []
        done = [kept for kept in self._kept if kept.step_id <= step_id]
        self._kept = [kept for kept in self._kept if kept.step_id > step_id]
        self.num_kept_blocks -= sum(len(kept.blocks) for kept in done)
        return done
