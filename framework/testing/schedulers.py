"""The contract suite of schedulers: limits, blocks, endings and tokens over random histories, without a model.

Each function of `CHECKS` takes a `SchedulerCase` and raises AssertionError when a duty of `framework.interfaces`'s
Scheduler is broken. `connector_engine` runs it: KV there depends on the whole prefix, so that a wrong block is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from framework.batch import NULL_ROW, SchedulerOutput
from framework.errors import RequestError
from framework.interfaces import Scheduler, SchedulerContext
from framework.nulls import NoConnector
from framework.request import Request
from framework.testing.checking import assert_all
from framework.testing.connector_engine import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    ConnectorEngine,
    make_request,
)

STATS = (
    "num_waiting", "num_running", "num_free_blocks", "num_blocks", "num_preemptions", "prefix_hit_tokens",
    "prefix_query_tokens",
)  # fmt: skip
NUM_BLOCKS = 12
"""A pool in which three or four requests run dry."""


@dataclass(frozen=True)
class SchedulerCase:
    """The scheduler is built as target(options, SchedulerContext)."""

    target: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def engine(self, *, num_blocks: int = NUM_BLOCKS, **limits: Any) -> ConnectorEngine:
        return ConnectorEngine(
            NoConnector(),
            num_blocks=num_blocks,
            scheduler=self._held_to_limits,
            options=self.options,
            name=self.name,
            **limits,
        )

    def _held_to_limits(self, options: Any, ctx: SchedulerContext) -> Any:
        return _HeldToLimits(self.target(options, ctx), self.name)


class _HeldToLimits:
    """A scheduler whose steps are looked at before they run."""

    def __init__(self, scheduler: Any, name: str) -> None:
        self._scheduler, self._name = scheduler, name
        self._present: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> SchedulerOutput:
        step: SchedulerOutput = self._scheduler.schedule()
        rows, counts = step.rows.tolist(), step.num_scheduled_tokens.tolist()
        self._present -= {*step.finished, *step.preempted, *step.aborted}
        arrived = [new.req_idx for new in step.new]
        self._say(len(set(rows)) == len(rows), f"a step names a row twice: {rows}")
        self._say(NULL_ROW not in rows, "a step runs row 0, which is nobody's")
        self._say(all(count >= 1 for count in counts), f"a step computes {counts} tokens of its rows")
        self._say(
            sum(counts) <= MAX_NUM_BATCHED_TOKENS, f"a step of {sum(counts)} tokens, {MAX_NUM_BATCHED_TOKENS} may"
        )
        self._say(not self._present & set(arrived), "a request arrives in a row that another one has")
        self._present |= set(arrived)
        self._say(len(self._present) <= MAX_NUM_SEQS, f"{len(self._present)} requests have rows, {MAX_NUM_SEQS} may")
        self._say(set(rows) <= self._present, "a row runs that no request has arrived in")
        return step

    def _say(self, is_right: bool, what: str) -> None:
        assert is_right, f"{self._name}: {what}"


def check_it_has_every_method(case: SchedulerCase) -> None:
    names = [name for name in vars(Scheduler) if not name.startswith("_")]
    missing = [name for name in names if not callable(getattr(case.target, name, None))]
    assert not missing, f"{case.name}: lacks {', '.join(missing)}; see framework.interfaces.Scheduler"


def check_stats_are_complete(case: SchedulerCase) -> None:
    with case.engine() as engine:
        stats = engine.scheduler.stats()
    missing = [name for name in STATS if name not in stats]
    assert not missing, f"{case.name}: stats() lacks {', '.join(missing)}"
    assert stats["num_free_blocks"] == NUM_BLOCKS - 1, (
        f"{case.name}: {stats['num_free_blocks']} of {NUM_BLOCKS} blocks are free at the start; block 0 is nobody's"
    )


def check_every_request_gets_its_tokens(case: SchedulerCase) -> None:
    """Random arrivals in a pool that is too small: all end, with their own tokens, and every block comes back."""
    for seed in range(3):
        _history(case, seed)


def check_steps_in_flight_change_nothing(case: SchedulerCase) -> None:
    """As above, with a step that is scheduled while another one runs."""
    for seed in range(3, 6):
        _history(case, seed, max_in_flight=2)


def check_without_prefix_cache(case: SchedulerCase) -> None:
    for seed in range(6, 8):
        _history(case, seed, prefix_caching=False)


def check_without_chunks(case: SchedulerCase) -> None:
    """Prompts are computed whole; they are no longer than a step."""
    for seed in range(8, 10):
        _history(case, seed, chunked_prefill=False, longest=MAX_NUM_BATCHED_TOKENS)


def check_failed_steps_leave_nothing_behind(case: SchedulerCase) -> None:
    """Every few steps one fails: what ran is aborted, and its blocks come back."""
    for seed in range(10, 12):
        _history(case, seed, failing=0.1, max_in_flight=1 + seed % 2)


def check_abort_ends_whoever_waits_or_runs(case: SchedulerCase) -> None:
    with case.engine() as engine:
        requests = [make_request(f"r{i}", range(9), 9, arrival=i) for i in range(7)]
        for request in requests:
            engine.add(request)
        for _ in range(3):
            engine.step()
        assert engine.scheduler.abort("nobody") is None, f"{case.name}: abort of an unknown id is not None"
        for request in (requests[0], requests[-1]):
            ended = engine.scheduler.abort(request.request_id)
            assert ended is request, f"{case.name}: abort gives {ended!r}, not the request"
            assert request.finish_reason == "abort", f"{case.name}: an aborted request says {request.finish_reason!r}"
        engine.drain()


def check_stop_string_ends_with_stop(case: SchedulerCase) -> None:
    with case.engine() as engine:
        request = make_request("a", range(5), 9)
        engine.add(request)
        for _ in range(3):
            engine.step()
        engine.scheduler.stop("a", "END")
        found = (request.finish_reason, request.stop_reason)
        assert found == ("stop", "END"), f"{case.name}: a request that was stopped says {found}"
        engine.drain()


def check_restart_begins_anew(case: SchedulerCase) -> None:
    """Running requests wait again and are computed anew, with the same tokens in the end."""
    with case.engine() as engine:
        requests = [make_request(f"r{i}", range(i, i + 6), 7, arrival=i) for i in range(4)]
        for request in requests:
            engine.add(request)
        for _ in range(4):
            engine.step()
        engine.scheduler.restart()
        assert engine.scheduler.stats()["num_running"] == 0, f"{case.name}: requests run on after restart()"
        engine.drain()
        _assert_ended(case, requests)


def check_impossible_request_is_refused(case: SchedulerCase) -> None:
    """What the pool alone cannot hold is refused before anything is queued."""
    with case.engine(num_blocks=4) as engine:
        request = make_request("big", range(30), MAX_MODEL_LEN - 30)
        for method in (engine.scheduler.check_request, engine.scheduler.add_request):
            try:
                method(request)
            except RequestError:
                continue
            raise AssertionError(f"{case.name}: {method.__name__} takes a request of 16 blocks in a pool of 3")
        assert not engine.scheduler.has_work(), f"{case.name}: a refused request is queued"


def _history(
    case: SchedulerCase, seed: int, *, failing: float = 0.0, longest: int = 20, max_in_flight: int = 1, **limits: bool
) -> None:
    random = Random(seed)
    with case.engine(max_in_flight=max_in_flight, **limits) as engine:
        requests = []
        for arrival in range(18):
            length = random.randint(1, longest)
            shared = random.randint(0, length - 1)
            prompt = [*range(shared), *(random.randint(0, 40) for _ in range(length - shared))]
            requests.append(make_request(f"r{arrival}", prompt, random.randint(4, 16), arrival=arrival))
            engine.add(requests[-1])
            for _ in range(random.randint(0, 3)):
                engine.step(fails=random.random() < failing)
        engine.drain()
        if not failing:
            _assert_ended(case, requests)


def _assert_ended(case: SchedulerCase, requests: list[Request]) -> None:
    left = [request.request_id for request in requests if request.finish_reason != "length"]
    assert not left, f"{case.name}: {', '.join(left)} never came to an end"


CHECKS = (
    check_it_has_every_method,
    check_stats_are_complete,
    check_every_request_gets_its_tokens,
    check_steps_in_flight_change_nothing,
    check_without_prefix_cache,
    check_without_chunks,
    check_failed_steps_leave_nothing_behind,
    check_abort_ends_whoever_waits_or_runs,
    check_stop_string_ends_with_stop,
    check_restart_begins_anew,
    check_impossible_request_is_refused,
)


def check_scheduler(case: SchedulerCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
