"""Decodes that go on: while the same requests compute a token each, a step follows from the one before it.

Nearly every step of a busy engine is such a one, and it finds the caches full of weights: what it does not do counts.
So nothing is done a request a step: the course keeps what its requests have got, and tells them when somebody may look.
The scheduler starts a course behind a step of decodes and drops it as soon as a request arrives, leaves or yields.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from framework.batch import NO_BLOCKS, BlockDelta, BlockOps, SchedulerOutput
from framework.scheduler.ledger import Entering, StepRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.batch import StepOutput
    from framework.scheduler.block_pool import BlockPool

MAX_UNTOLD = 64
"""Steps after which the requests are told in any case: a longer silence would end in a longer pause."""
_AT_ONCE = 8
"""Steps whose positions are counted together, and blocks whose columns are."""


class Course:
    """The steps behind `step`, one of decodes in which every running request ran and drew.

    Between `emit` and `settle` the requests' `token_ids`, `num_computed_tokens`, `num_in_flight` and `block_ids` are
    behind.

    room      steps that can follow, up to the one in which one of the requests draws its last token
    requests  all running requests, in batch-row order
    """

    def __init__(self, step: StepRecord, block_size: int, num_groups: int) -> None:
        self.requests, self._block_size, self._num_groups, self._age = step.requests, block_size, num_groups, 0
        self._last = replace(step.scheduled, new=[], finished=[], preempted=[], aborted=[], block_ops=BlockOps())
        self._generations = step.generations
        self.room = min([r.max_total_tokens - len(r.token_ids) - r.num_in_flight for r in self.requests])
        self._no_blocks = (NO_BLOCKS,) * num_groups
        # at the age of this index, and then once a block, the tokens of these batch rows are the first of a block
        self._entering_rows: list[list[int]] = [[] for _ in range(block_size)]
        for row, request in enumerate(self.requests):
            self._entering_rows[-request.num_computed_tokens % block_size].append(row)
        self._entering: dict[int, Entering] = {}  # the same, made when their age has come
        sets = chain.from_iterable((r.eos_token_ids, r.stop_token_ids) for r in self.requests)
        self._endings = frozenset().union(*{id(s): s for s in sets}.values())
        self._num_ahead = 0  # steps emitted that the requests' counters do not hold yet
        self._taken: list[NDArray[np.int32]] = []  # [R, 1] tokens of steps that came back, which they do not know yet
        self._upcoming: list[NDArray[np.int32]] = []  # num_computed_tokens of the next steps, the last one first
        self._computed: NDArray[np.int32] | None = None  # [R] the positions that the last of these has computed
        self._next = self._next_entering()

    # -------------------------------------------------------------------------------------------- going on

    @property
    def num_entering(self) -> int:
        """Blocks that the next step takes."""
        return 0 if self._next is None else len(self._next.requests) * self._num_groups

    def _next_entering(self) -> Entering | None:
        age = self._age % self._block_size
        rows = self._entering_rows[age]
        if rows and age not in self._entering:
            self._entering[age] = self._make_entering(rows)
        return self._entering.get(age)

    def _make_entering(self, rows: list[int]) -> Entering:
        requests, at = [self.requests[row] for row in rows], np.array(rows, np.int32)
        columns = [(request.num_computed_tokens + self._num_ahead) // self._block_size for request in requests]
        return Entering(requests, at, self._last.rows[at], np.array(columns, np.int32), np.ones(len(at), np.int32))

    def emit(self, step_id: int, pool: BlockPool) -> StepRecord:
        """The next step, with blocks for those that begin one."""
        deltas = self._enter(pool)
        self.room -= 1
        self._age += 1
        self._num_ahead += 1
        last = self._last  # nothing arrives or leaves: its empty lists serve again
        self._last = scheduled = SchedulerOutput(
            step_id=step_id,
            rows=last.rows,
            num_scheduled_tokens=last.num_scheduled_tokens,
            num_computed_tokens=_following(last.num_computed_tokens, self._upcoming),
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
        if not self.room:  # tokens that end a request are none of a course
            return StepRecord(scheduled, self.requests, self._generations)
        # a request that enters a block with the next step fills its last one with this
        self._next = self._next_entering()
        return StepRecord(scheduled, self.requests, self._generations, self, self._next)

    def _enter(self, pool: BlockPool) -> tuple[BlockDelta, ...]:
        entering = self._next
        if entering is None:
            return self._no_blocks
        columns, n = entering.columns, len(entering.requests)
        blocks = pool.allocate(n * self._num_groups)
        pool.write(blocks)
        entering.untold.append(blocks)
        entering.columns = _following(columns, entering.upcoming)  # the step keeps its own
        ids = np.array(blocks, np.int32).reshape(self._num_groups, n)
        return tuple([BlockDelta(entering.rows, columns, entering.each, of_group, entering.at) for of_group in ids])

    # ------------------------------------------------------------------------------------------ coming back

    def may_end(self, sampled: NDArray[np.int32]) -> bool:
        """Whether one of the tokens [R, 1] ends one of the requests; False is certain."""
        return bool(self._endings) and not self._endings.isdisjoint(sampled[:, 0].tolist())

    def take(self, scheduled: SchedulerOutput, sampled: NDArray[np.int32]) -> None:
        """Keeps the tokens [R, 1] of a step that came back, behind those that the requests do not know yet either."""
        self._taken.append(sampled)
        self._computed = scheduled.num_computed_tokens

    @property
    def is_full(self) -> bool:
        """Whether it has to be settled before it can take another step."""
        return len(self._taken) >= MAX_UNTOLD

    def tell(self, entering: Entering) -> None:
        """Gives some of the requests their tokens and blocks, and leaves their counters behind."""
        self._give_blocks(entering)
        if entering.num_told == len(self._taken):
            return
        tokens = np.concatenate(self._taken[entering.num_told :], axis=1)[entering.at].tolist()
        entering.num_told = len(self._taken)
        for request, new in zip(entering.requests, tokens, strict=True):
            request.token_ids += new

    def settle(self) -> bool:
        """Brings all requests up to date; False when they were. Ends nothing; a course that has ended was settled."""
        ahead, taken = self._num_ahead, len(self._taken)
        if not (ahead or taken):
            return False
        tokens = np.concatenate(self._taken, axis=1).tolist() if taken else [[]] * len(self.requests)
        for entering in self._entering.values():
            self._give_blocks(entering)
            for row in entering.at.tolist() if entering.num_told else ():
                del tokens[row][: entering.num_told]
            entering.num_told = 0
        self._num_ahead, self._taken = 0, []
        for request, new in zip(self.requests, tokens, strict=True):
            request.num_computed_tokens += ahead
            request.num_in_flight += ahead - taken
            request.token_ids += new
        return True

    def _give_blocks(self, entering: Entering) -> None:
        if not entering.untold:
            return
        n, first = len(entering.requests), (entering.columns - len(entering.untold)).tolist()
        for group in range(self._num_groups):
            columns = zip(*[blocks[group * n : (group + 1) * n] for blocks in entering.untold], strict=True)
            for request, expected, new in zip(entering.requests, first, columns, strict=True):
                held = request.block_ids[group]
                assert len(held) == expected, f"request {request.request_id} holds {len(held)} blocks, not {expected}"
                held += new
        entering.untold = []

    def num_filled(self) -> list[int]:
        """[R] whole blocks of each request when the last step was taken. 0 before any was: steps from before the course
        may be in flight still."""
        if self._computed is None:
            return [0] * len(self.requests)
        filled: list[int] = ((self._computed + 1) // self._block_size).tolist()
        return filled

    def untold_blocks(self) -> list[int]:
        """Blocks that requests have and do not hold yet."""
        return [block for one in self._entering.values() for blocks in one.untold for block in blocks]


def _following(last: NDArray[np.int32], upcoming: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """last + 1. upcoming: what is there already, the next one at the end."""
    if not upcoming:
        upcoming += [*(last + np.arange(_AT_ONCE, 0, -1, dtype=np.int32)[:, None])]
    return upcoming.pop()


def gives_one_each(output: StepOutput, num_rows: int) -> bool:
    """Whether every row of the step drew one token, and nothing comes along but logprobs."""
    if output.errors or output.told or output.prompt_logprobs or output.sampled.shape != (num_rows, 1):
        return False
    # each is 0 or 1 where a row draws one token; numpy's own reductions cost three times as much with cold caches
    return output.num_valid.tobytes().count(1) == num_rows
