"""A KV connector whose faults end nothing: what it cannot bring is computed, and what it kept is given back.

The engine puts it around every connector of a plugin. It keeps the books of loads and kept stays, so that one that
raises can be left alone from then on, and so that a report nobody waits for goes no further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from framework.engine.connector_answers import anything, claim, match, numbers, reports
from framework.errors import KVMemoryError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import SchedulerOutput
    from framework.interfaces import Backend, KVConnector, KVSpec
    from framework.request import Request

Blocks = Sequence[Sequence[int]]
T = TypeVar("T")

_log = logging.getLogger("framework")
OVERDUE_S = 300.0
"""A connector that has not reported an asynchronous load or a kept stay for so long is taken for broken; a request of
which it has answered `ask again` for so long is computed."""
IDLE_S = 0.001
"""What a step without rows takes at least while the connector is waited for."""


@dataclass(slots=True)
class _Load:
    """Blocks that the connector fills, since when."""

    blocks: list[int]
    is_async: bool
    since: float


@dataclass(slots=True)
class _Meta:
    """Metadata of the connector, and the leases of the loads that are done within the step."""

    inner: Any
    within_step: list[int]


class GuardedConnector:
    """`interfaces.KVConnector` around `connector`, which the log calls `label`."""

    def __init__(self, connector: KVConnector, label: str, block_size: int) -> None:
        self._connector, self._label, self._block_size = connector, label, block_size
        self.layerwise = bool(connector.layerwise)
        self._matched: Request | None = None  # whom the last answer was about
        self._is_async = False
        self._unanswered: dict[Request, float] = {}  # `ask again`, since when
        self._within_step: list[int] = []
        self._lock = threading.Lock()
        self._unclosed: Exception | None = None  # what its close raised after it had broken
        # Under the lock, for both sides:
        self._is_broken = False
        self._loads: dict[int, _Load] = {}  # by lease, until they are reported, or the step that does them is over
        self._kept: dict[int, float] = {}  # since when
        # Of the worker side alone:
        self._meta: _Meta | None = None  # of the step that is reported next
        self._failed: list[int] = []
        self._early: list[int] = []  # failed blocks of loads within steps that are still to be reported

    def _ask(self, method: str, read: Callable[[Any], T], neutral: Any, *args: Any) -> T:
        """What `read` makes of the connector's answer; of `neutral` from the moment on when it has raised, or answered
        what `read` cannot take."""
        if self._is_broken:
            return read(neutral)
        try:
            answer = getattr(self._connector, method)(*args)
        except Exception:
            _log.exception("%s raised in %s; the engine goes on without it", self._label, method)
        else:
            try:
                return read(answer)
            except Exception as error:
                text = "%s answered %s to %s (%s); the engine goes on without it"
                _log.error(text, self._label, shown(answer), method, error)
        self._give_up()
        return read(neutral)

    def _tell(self, method: str, *args: Any) -> None:
        self._ask(method, anything, None, *args)

    def _refuse_overdue(self) -> None:
        """Ends a connector that has been silent for too long. A load within a step takes as long as its step does."""
        with self._lock:
            loads = {lease: load.since for lease, load in self._loads.items() if load.is_async}
            waiting = loads | self._kept
        late = [lease for lease, since in waiting.items() if monotonic() - since > OVERDUE_S]
        if late:
            _log.error(
                "%s has not reported leases %s for %.0f s; the engine goes on without it", self._label, late, OVERDUE_S
            )
            self._give_up()

    def _give_up(self) -> None:
        """Ends the connector. What it still owes is reported with the next step: loads as failed, stays as sent. If it
        cannot be closed, that step raises instead: a thread of it may still touch those blocks."""
        try:
            self._connector.close()
        except Exception as error:
            _log.exception("%s raised in close", self._label)
            self._unclosed = error
        with self._lock:
            self._is_broken = True

    # -------------------------------------------------------------------------------------- scheduler side

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = self._ask("matched_tokens", match, (0, False), request, num_computed_tokens)
        self._matched, self._is_async = request, is_async
        if count is None and self._is_unanswered_for_long(request):
            count = 0
        return count, is_async

    def _is_unanswered_for_long(self, request: Request) -> bool:
        if request not in self._unanswered:
            self._unanswered = {r: since for r, since in self._unanswered.items() if r.finish_reason is None}
            self._unanswered[request] = monotonic()
        since = self._unanswered[request]
        if monotonic() - since <= OVERDUE_S:
            return False
        if since > -inf:  # it may be asked about again, until it has its blocks
            text = "%s has answered `ask again` of request %s for %.0f s; it is computed"
            _log.error(text, self._label, request.request_id, OVERDUE_S)
            self._unanswered[request] = -inf
        return True

    def after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        self._unanswered.pop(request, None)
        if num_external_tokens:
            self._note_load(request, blocks, num_external_tokens)
        self._tell("after_alloc", request, blocks, num_external_tokens)

    def _note_load(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        assert self._matched is request, f"request {request.request_id} is admitted with an answer about another one"
        last = request.num_computed_tokens // self._block_size
        first = last - num_external_tokens // self._block_size
        load = _Load([group[i] for i in range(first, last) for group in blocks], self._is_async, monotonic())
        if not load.is_async:
            self._within_step.append(request.lease)
        with self._lock:
            self._loads[request.lease] = load

    def build_meta(self, scheduled: SchedulerOutput) -> _Meta | None:
        inner = self._ask("build_meta", anything, None, scheduled)
        leases, self._within_step = self._within_step, []
        return None if inner is None and not leases else _Meta(inner, leases)

    def request_finished(self, request: Request, blocks: Blocks) -> bool:
        return self._keeps(request.lease, self._ask("request_finished", claim, False, request, blocks))

    def request_preempted(self, request: Request, blocks: Blocks) -> bool:
        return self._keeps(request.lease, self._ask("request_preempted", claim, False, request, blocks))

    def _keeps(self, lease: int, answer: bool) -> bool:
        with self._lock:
            if not answer or self._is_broken:
                return False
            self._kept[lease] = monotonic()
            return True

    def step_lost(self, meta: _Meta | None) -> None:
        self._tell("step_lost", None if meta is None else meta.inner)
        self._step_over(meta)

    # ----------------------------------------------------------------------------------------- worker side

    def bind(self, backend: Backend, kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> None:
        """Raises what the connector raises: the engine is not built without the one that was asked for."""
        self._connector.bind(backend, kv, specs)

    def start_load(self, meta: _Meta | None) -> None:
        self._tell("start_load", None if meta is None else meta.inner)

    def wait_layer(self, layer: int) -> None:
        self._tell("wait_layer", layer)

    def save_layer(self, layer: int) -> None:
        self._tell("save_layer", layer)

    def wait_saves(self, meta: _Meta | None) -> None:
        self._meta = meta
        self._tell("wait_saves", None if meta is None else meta.inner)

    def idle(self) -> None:
        """Waits a moment, also where the connector does not: steps that do nothing but ask it are not made at full
        speed."""
        begun = monotonic()
        self._tell("idle")
        if self._is_waited_for():
            sleep(max(0.0, begun + IDLE_S - monotonic()))

    def _is_waited_for(self) -> bool:
        with self._lock:
            return bool(self._unanswered or self._kept or any(load.is_async for load in self._loads.values()))

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        sent, received = self._ask("finished", reports, ((), ()))
        self._failed = self._due(self._ask("failed_blocks", numbers, ()))
        if self._is_broken:  # a load is received only if its failures are known as well
            sent, received = [], []
        with self._lock:
            sent = [lease for lease in dict.fromkeys(sent) if self._kept.pop(lease, None) is not None]
            received = [lease for lease in dict.fromkeys(received) if self._loads.pop(lease, None) is not None]
        self._refuse_overdue()
        if self._is_broken:
            self._report_owed(sent, received)
        self._step_over(self._meta)
        return sent, received

    def _due(self, failed: Sequence[int]) -> list[int]:
        """The failed blocks that this step reports. Those of a load within a later step come with that one; whatever is
        in no open load is not reported at all: its step was lost, and it may be another request's by now."""
        failed, self._early = [*self._early, *failed], []
        if not failed:
            return []
        is_due: dict[int, bool] = {}
        with self._lock:
            for lease, load in self._loads.items():
                is_due |= dict.fromkeys(load.blocks, load.is_async or lease in self._within(self._meta))
        self._early = [block for block in failed if is_due.get(block) is False]
        return [block for block in failed if is_due.get(block)]

    def _report_owed(self, sent: list[int], received: list[int]) -> None:
        """Adds what a broken connector owes by the end of this step."""
        with self._lock:
            num_owed = len(self._kept) + len(self._loads)
            if num_owed and self._unclosed is not None:
                raise KVMemoryError(
                    f"{self._label} broke with {num_owed} transfers under way and raised {self._unclosed!r} in close: "
                    "it may still touch KV memory. Close the engine, and make another one without it"
                ) from self._unclosed
            sent += self._kept
            self._kept.clear()
            owed = {lease: load for lease, load in self._loads.items() if load.is_async}
            received += owed
            owed |= {lease: self._loads[lease] for lease in self._within(self._meta) if lease in self._loads}
            self._failed += [block for load in owed.values() for block in load.blocks]
            for lease in owed:
                del self._loads[lease]

    def failed_blocks(self) -> Sequence[int]:
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        if not self._is_broken:
            self._give_up()

    def _step_over(self, meta: _Meta | None) -> None:
        """Loads within the step of `meta` are done, or failed, or nobody needs them any more."""
        with self._lock:
            for lease in self._within(meta):
                self._loads.pop(lease, None)

    @staticmethod
    def _within(meta: _Meta | None) -> Sequence[int]:
        return () if meta is None else meta.within_step
