"""An engine without a model: a scheduler, a policy, a KV connector, host memory, and KV that is a known function.

The value of a token's slot depends on its whole prefix, salt and adapter, as KV does, so that every block that a step
reads can be checked. The contract suites of connectors, schedulers and policies put what they check into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import sleep
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from framework.batch import SchedulerOutput, StepOutput, Transfers
from framework.interfaces import KVConnector, KVGroup, KVSpec, Policy, SchedulerContext
from framework.request import Request, RequestStatus, SamplingParams
from framework.scheduler import Scheduler

BLOCK_SIZE = 4
SHAPES = ((2, 3, -1, BLOCK_SIZE, 5), (-1, BLOCK_SIZE, 7))
"""Two layers of different layouts; the tokens of a block lie on the axis before the last in both."""
BLOCK_BYTES = 4 * BLOCK_SIZE * (2 * 3 * 5 + 7)
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 4, 7, 64
MAX_STEPS = 2000
IDLE_S = 0.0005
"""What a step without rows takes at least: an engine does not ask a connector at full speed."""


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 4, *, arrival: int = 0, **fields: Any) -> Request:
    """A greedy request. fields: others of `Request`, such as cache_salt and lora."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    total = len(prompt) + max_tokens
    return Request(name, list(prompt), params, seed=0, max_total_tokens=total, arrival_index=arrival, **fields)


class HostMemory:
    """The part of `interfaces.Backend` that connectors use, for tensors of the host."""

    def gather_blocks(self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int]) -> list[Tensor]:
        pairs = zip(kv, specs, strict=True)
        return [tensor.movedim(spec.shape.index(-1), 0)[list(blocks)].clone() for tensor, spec in pairs]

    def scatter_blocks(
        self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int], data: Sequence[Tensor]
    ) -> None:
        for tensor, spec, values in zip(kv, specs, data, strict=True):
            tensor.movedim(spec.shape.index(-1), 0)[list(blocks)] = values


@dataclass(slots=True)
class _Row:
    """One row of the request table. is_spoilt: a block of it was never loaded, and what it draws means nothing."""

    request: Request
    tokens: list[int]
    blocks: list[int]
    is_spoilt: bool = False


class ConnectorEngine:
    """Schedules, executes and updates with `connector`, and holds it to its word after each step. A context manager.

    name  of what is checked, for the errors; the connector's by default
    """

    def __init__(
        self,
        connector: KVConnector,
        *,
        num_blocks: int = 40,
        max_in_flight: int = 1,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        scheduler: Callable[[Any, SchedulerContext], Any] = Scheduler,
        options: Any = None,
        policy: Policy | None = None,
        name: str | None = None,
    ) -> None:
        self.connector: Any = connector  # tests put functions of their own into it
        self._books = _Books(connector, name or type(connector).__name__)
        ctx = SchedulerContext(
            groups=(KVGroup("full", block_size=BLOCK_SIZE),),
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            chunked_prefill=chunked_prefill,
            prefix_caching=prefix_caching,
            policy=policy or _ByArrival(),
            connector=self._books,
            max_in_flight=max_in_flight,
        )
        self._num_blocks, self._max_in_flight = num_blocks, max_in_flight
        self.scheduler: Any = scheduler(options or {}, ctx)
        self._specs = [KVSpec(shape, torch.float32, 0) for shape in SHAPES]
        self._kv = [torch.zeros([num_blocks if n == -1 else n for n in shape]) for shape in SHAPES]
        memory: Any = HostMemory()
        connector.bind(memory, self._kv, self._specs)
        self._views = [kv.movedim(shape.index(-1), 0) for kv, shape in zip(self._kv, SHAPES, strict=True)]
        self._rows: dict[int, _Row] = {}  # of the worker side
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[SchedulerOutput, Future[StepOutput]]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._has_failed = False  # steps behind one that failed are not run, until all are taken back

    def __enter__(self) -> ConnectorEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._books.close()

    # ---------------------------------------------------------------------------------------- engine's thread

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Runs requests to their end."""
        for request in requests:
            self.add(request)
        self.drain()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self, fails: bool = False) -> None:
        """One step with as many in flight as allowed. fails: the step raises between its loads and its stores."""
        while self.scheduler.has_work() and len(self._in_flight) < self._max_in_flight:
            scheduled = self.scheduler.schedule()
            self._in_flight.append((scheduled, self._thread.submit(self._execute, scheduled, fails)))
        if self._in_flight:
            self._take_step()

    def drain(self) -> None:
        """Steps until nothing is left: every request has ended as it should, and every block is free."""
        for _ in range(MAX_STEPS):
            self.step()
            if not self.scheduler.has_work() and not self._in_flight:
                break
        self._assert_nothing_is_left()
        for request in self._requests.values():
            if request.finish_reason == "length":
                assert request.output_token_ids == _expected(request), (
                    f"{self._books.name}: request {request.request_id} drew otherwise than alone"
                )

    def _assert_nothing_is_left(self) -> None:
        books, stats = self._books, self.scheduler.stats()
        left = [name for name, request in self._requests.items() if request.status is not RequestStatus.FINISHED]
        when = f"{MAX_STEPS} steps and {stats['num_preemptions']} preemptions" if left else "the last request"
        assert not left and stats["num_free_blocks"] == self._num_blocks - 1, (
            f"{books.name}: {stats['num_free_blocks']} of {self._num_blocks - 1} blocks are free after {when}; kept"
            f" {sorted(books.kept)}, loading {sorted(books.loading)}, not ended {left}"
        )

    def _take_step(self) -> None:
        scheduled, future = self._in_flight[0]
        try:
            output = future.result()
        except _StepFailed:
            self._lose_steps()
            return
        self._in_flight.popleft()
        self._check_reports(output.connector)
        self.scheduler.update(scheduled, output)

    def _lose_steps(self) -> None:
        """What an engine does after a failed step: it aborts what ran, and takes back the steps in flight."""
        for request in list(self._requests.values()):
            if request.status is RequestStatus.RUNNING:
                self.scheduler.abort(request.request_id)
        while self._in_flight:
            scheduled, future = self._in_flight.popleft()
            assert isinstance(future.exception(), _StepFailed), "a step behind one that failed is not run"
            none = np.zeros((scheduled.num_rows, 1), np.int32)
            self.scheduler.update(scheduled, StepOutput(none, none[:, 0], is_lost=True))
        self._has_failed = False

    def _check_reports(self, reports: Transfers | None) -> None:
        for lease in reports.sent if reports else ():
            assert lease in self._books.kept, (
                f"{self._books.name} reports lease {lease} as sent, which it does not keep"
            )
            self._books.kept.remove(lease)
        for lease in reports.received if reports else ():
            assert lease in self._books.loading, f"{self._books.name} reports lease {lease}, which does not load"
            self._books.loading = {one: blocks for one, blocks in self._books.loading.items() if one != lease}

    # ---------------------------------------------------------------------------------------- worker's thread

    def _execute(self, scheduled: SchedulerOutput, fails: bool) -> StepOutput:
        if self._has_failed:
            raise _StepFailed
        self._update_rows(scheduled)
        self._books.start_load(scheduled.connector_meta)
        if not scheduled.num_rows:
            self._books.idle()
            sleep(IDLE_S)
        if fails:
            self._has_failed = True
            raise _StepFailed
        sampled = np.zeros((scheduled.num_rows, 1), np.int32)
        wrong = self._forward(scheduled, sampled)
        self._books.wait_saves(scheduled.connector_meta)
        sent, received = self._books.finished()
        failed = self._waited_for(self._books.failed_blocks(), scheduled)
        for row in wrong:
            row.is_spoilt = True
            assert not set(failed).isdisjoint(row.blocks), (
                f"{self._books.name}: request {row.request.request_id} reads KV that is not its own, and no block of "
                "it was reported as failed"
            )
        return StepOutput(sampled, scheduled.samples.astype(np.int32), connector=Transfers(sent, received, failed))

    def _waited_for(self, failed: Sequence[int], scheduled: SchedulerOutput) -> list[int]:
        """Without blocks of loads within lost steps, whose reports count for nothing."""
        arrived = [block for new in scheduled.new for block in self._rows[new.req_idx].blocks]
        awaited = {*arrived, *(block for blocks in self._books.loading.values() for block in blocks)}
        return [block for block in failed if block in awaited]

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        for number in (*scheduled.finished, *scheduled.preempted, *scheduled.aborted):
            self._rows.pop(number, None)
        for new in scheduled.new:
            self._rows[new.req_idx] = _Row(self._requests[new.request_id], new.token_ids.tolist(), [])
        delta = scheduled.new_block_ids[0]
        ids = iter(delta.ids.tolist())
        for number, count in zip(delta.rows.tolist(), delta.counts.tolist(), strict=True):
            self._rows[number].blocks += [next(ids) for _ in range(count)]

    def _forward(self, scheduled: SchedulerOutput, sampled: Any) -> list[_Row]:
        """Writes the KV of the step and draws; returns the rows that would have read KV which is not theirs."""
        wrong = []
        spans = zip(scheduled.rows, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens, strict=True)
        for i, (number, start, count) in enumerate(spans):
            row, end = self._rows[number], start + count
            values = _values(row.request, row.tokens[:end])
            for layer, view in enumerate(self._views):
                if self.connector.layerwise and scheduled.connector_meta is not None:
                    self._books.wait_layer(layer)
                for position in range(start, end):
                    view[row.blocks[position // BLOCK_SIZE]][..., position % BLOCK_SIZE, :] = values[position] + layer
                if not row.is_spoilt and row not in wrong and not self._holds(row, values, view, layer):
                    wrong.append(row)
                if self.connector.layerwise and scheduled.connector_meta is not None:
                    self._books.save_layer(layer)
            if scheduled.samples[i]:
                sampled[i] = values[-1] % 50
                row.tokens.append(int(sampled[i, 0]))
        return wrong

    def _holds(self, row: _Row, values: list[int], view: Tensor, layer: int) -> bool:
        """Whether every slot of the row's tokens holds its value."""
        for column, first in enumerate(range(0, len(values), BLOCK_SIZE)):
            wanted = torch.tensor(values[first : first + BLOCK_SIZE], dtype=torch.float32) + layer
            there = view[row.blocks[column]][..., : len(wanted), :]
            if not torch.equal(there, wanted.unsqueeze(1).expand_as(there)):
                return False
        return True


class _StepFailed(Exception):
    """What a step raises that is to fail."""


class _ByArrival:
    """`interfaces.Policy`: first come, first served."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return waiting

    def admit(self, request: Request, budget: int) -> bool:
        return True

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda request: request.arrival_index)


class _Books:
    """A connector, and what it owes: stays that it keeps, and asynchronous loads with their blocks, by lease."""

    def __init__(self, connector: KVConnector, name: str) -> None:
        self._connector, self.name = connector, name
        self.kept: set[int] = set()
        self.loading: dict[int, list[int]] = {}
        self._is_async = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, self._is_async = self._connector.matched_tokens(request, num_computed_tokens)
        return count, self._is_async

    def after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        if num_external_tokens and self._is_async:
            self.loading = {**self.loading, request.lease: [block for group in blocks for block in group]}
        self._connector.after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return self._keeps(request.lease, self._connector.request_finished(request, blocks))

    def request_preempted(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return self._keeps(request.lease, self._connector.request_preempted(request, blocks))

    def _keeps(self, lease: int, answer: bool) -> bool:
        assert isinstance(answer, bool), f"{self.name} must say True or False of blocks it keeps, not {answer!r}"
        if answer:
            self.kept.add(lease)
        return answer


def _values(request: Request, tokens: Sequence[int]) -> list[int]:
    """Of each token a number below 2^20, exact in float32, that depends on all before it."""
    state, values = crc32(repr((request.lora, request.cache_salt)).encode()), []
    for token in tokens:
        state = crc32(token.to_bytes(4, "little"), state)
        values.append(state % (1 << 20))
    return values


def _expected(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.max_total_tokens:
        tokens.append(_values(request, tokens)[-1] % 50)
    return tokens[request.num_prompt_tokens :]
