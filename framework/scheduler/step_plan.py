"""The step while it is being decided, and its translation into a `SchedulerOutput`.

A plan can still be taken back: a request that yields its blocks leaves it. Of a request that goes on, nothing but its
block list changes before `emit`; admission and preemption change theirs at once. The scheduler makes one plan a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from framework.batch import NO_BLOCKS, BlockDelta, BlockOps, NewRequest, SchedulerOutput
from framework.request import Request
from framework.scheduler.ledger import StepRecord


@dataclass(slots=True)
class Leaving:
    """Rows that leave the request table with the next step."""

    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """Decisions of one step.

    budget    tokens that may still be scheduled
    spans     tokens of each request that runs, in batch-row order
    new       requests admitted in this step
    columns   first block-table column that is new in each KV group, of each request that got blocks
    copies    (source, destination) of blocks that a sibling gives
    is_short  blocks ran out: nobody is admitted in this step
    """

    budget: int
    spans: dict[Request, int] = field(default_factory=dict)
    new: list[Request] = field(default_factory=list)
    columns: dict[Request, list[int]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    is_short: bool = False

    def add(self, request: Request, num_tokens: int) -> None:
        self.spans[request] = num_tokens
        self.budget -= num_tokens

    def take_back(self, request: Request) -> None:
        """The request does not run in this step after all."""
        self.budget += self.spans.pop(request, 0)
        self.columns.pop(request, None)

    def emit(self, step_id: int, num_groups: int, leaving: Leaving) -> StepRecord:
        """The step as the runner sees it, and as the ledger keeps it. Moves the requests' optimistic counters on."""
        new = [_new_request(request) for request in self.new]
        requests, spans = list(self.spans), list(self.spans.values())
        rows: list[int] = []
        starts: list[int] = []
        samples: list[bool] = []
        generations: list[int] = []
        num_prompt_tokens = 0
        for request, num_tokens in zip(requests, spans, strict=True):
            start = request.num_computed_tokens
            end = request.num_computed_tokens = start + num_tokens
            if start < (num_prompt := len(request.prompt_token_ids)):
                num_prompt_tokens += min(end, num_prompt) - start
            is_last = end == len(request.token_ids) + request.num_in_flight
            if is_last:
                request.num_in_flight += 1
            rows.append(request.req_idx)
            starts.append(start)
            samples.append(is_last)
            generations.append(request.num_preemptions)
        columns = np.array((rows, spans, starts), np.int32)  # one array costs less than three
        scheduled = SchedulerOutput(
            step_id=step_id,
            rows=columns[0],
            num_scheduled_tokens=columns[1],
            num_computed_tokens=columns[2],
            samples=np.array(samples, np.bool_),
            num_drafts=np.zeros(len(rows), np.int32),
            new=new,
            new_block_ids=block_deltas(self.columns, num_groups),
            finished=leaving.finished,
            preempted=leaving.preempted,
            aborted=leaving.aborted,
            num_prompt_tokens=num_prompt_tokens,
            only_decodes=bool(rows) and sum(spans) == len(rows) and all(samples),
            block_ops=BlockOps(copy=self.copies),
        )
        return StepRecord(scheduled, requests, generations, sources=[source for source, _ in self.copies])


def block_deltas(columns: Mapping[Request, Sequence[int]], num_groups: int) -> tuple[BlockDelta, ...]:
    """The blocks of each KV group that requests got; columns as in `StepPlan`."""
    if not columns:
        return (NO_BLOCKS,) * num_groups
    return tuple([_block_delta(columns, group) for group in range(num_groups)])


def _block_delta(columns: Mapping[Request, Sequence[int]], group: int) -> BlockDelta:
    """Only groups with a window grow while a prompt is computed in chunks: a request may have nothing new here."""
    grown = [(r, first[group]) for r, first in columns.items() if len(r.block_ids[group]) > first[group]]
    blocks = [request.block_ids[group][column:] for request, column in grown]
    return BlockDelta(
        rows=np.array([request.req_idx for request, _ in grown], np.int32),
        starts=np.array([column for _, column in grown], np.int32),
        counts=np.array([len(ids) for ids in blocks], np.int32),
        ids=np.array([block for ids in blocks for block in ids], np.int32),
    )


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        req_idx=request.req_idx,
        request_id=request.request_id,
        token_ids=np.array(request.token_ids, np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
        mm_features=request.mm_features,
    )
