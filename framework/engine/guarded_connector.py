"""A KV connector whose faults end nothing: what it cannot bring is computed, and what it kept is given back.

The engine puts it around every connector of a plugin. It keeps the books of loads and kept stays, so that one that
raises can be left alone from then on, and so that a report nobody waits for goes no further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from framework.engine.connector_answers import anything, claim, match, numbers, reports
from framework.errors import shown

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import SchedulerOutput
    from framework.interfaces import Backend, KVConnector, KVSpec
    from framework.request import Request

Blocks = Sequence[Sequence[int]]
T = TypeVar("T")

_log = logging.getLogger("framework")
OVERDUE_S = 300.0
"""A connector that has not reported an asynchronous load or a kept stay for so long is taken for broken: its requests would hang."""


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


@dataclass(slots=True)
class _Reports:
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class GuardedConnector:
    """`interfaces.KVConnector` around `connector`, which the log calls `label`."""

    def __init__(self, connector: KVConnector, label: str, block_size: int) -> None:
        self._connector, self._label, self._block_size = connector, label, block_size
        self.layerwise = bool(connector.layerwise)
        self._is_async = False  # the last answer about a match
        self._within_step: list[int] = []
        self._lock = threading.Lock()
        # Under the lock, for both sides:
        self._is_broken = False
        self._loads: dict[int, _Load] = {}  # by lease, until they are reported, or the step that does them is over
        self._kept: dict[int, float] = {}  # since when
        self._reports = _Reports()  # of a connector that has broken
        # Of the worker side alone:
        self._meta: _Meta | None = None
        self._failed: list[int] = []

    def _ask(self, method: str, read: Callable[[Any], T], neutral: T, *args: Any) -> T:
        """What `read` makes of the connector's answer; `neutral` from the moment on when it has raised, or answered
        what `read` cannot take."""
        if self._is_broken:
            return neutral
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
        return neutral

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
        """Ends the connector, and reports all that it still owes: loads as failed, stays as sent."""
        try:
            self._connector.close()
        except Exception:
            _log.exception("%s raised in close", self._label)
        with self._lock:
            self._is_broken = True
            self._reports.sent += self._kept
            self._reports.received += [lease for lease, load in self._loads.items() if load.is_async]
            self._reports.failed += [block for load in self._loads.values() for block in load.blocks]
            self._kept.clear()
            self._loads.clear()

    # -------------------------------------------------------------------------------------- scheduler side

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = self._ask("matched_tokens", match, (0, False), request, num_computed_tokens)
        self._is_async = is_async
        return count, is_async

    def after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._note_load(request, blocks, num_external_tokens)
        self._tell("after_alloc", request, blocks, num_external_tokens)

    def _note_load(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        last = request.num_computed_tokens // self._block_size
        first = last - num_external_tokens // self._block_size
        load = _Load([group[i] for i in range(first, last) for group in blocks], self._is_async, monotonic())
        if not load.is_async:
            self._within_step.append(request.lease)
        with self._lock:
            if self._is_broken:  # since it promised
                self._reports.failed += load.blocks
                self._reports.received += [request.lease] if load.is_async else []
            else:
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
        self._meta = meta
        self._tell("start_load", None if meta is None else meta.inner)

    def wait_layer(self, layer: int) -> None:
        self._tell("wait_layer", layer)

    def save_layer(self, layer: int) -> None:
        self._tell("save_layer", layer)

    def wait_saves(self) -> None:
        self._tell("wait_saves")

    def idle(self) -> None:
        self._tell("idle")

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        sent, received = self._ask("finished", reports, ([], []))
        failed = self._ask("failed_blocks", numbers, [])  # now: a load is received only if this is answered as well
        with self._lock:
            sent = [lease for lease in dict.fromkeys(sent) if self._kept.pop(lease, None) is not None]
            received = [lease for lease in dict.fromkeys(received) if self._loads.pop(lease, None) is not None]
        self._refuse_overdue()
        with self._lock:
            owed, self._reports = self._reports, _Reports()
        self._failed = [*failed, *owed.failed]
        self._step_over(self._meta)
        return sent + owed.sent, received + owed.received

    def failed_blocks(self) -> Sequence[int]:
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        self._tell("close")

    def _step_over(self, meta: _Meta | None) -> None:
        """Loads within the step of `meta` are done, or failed, or nobody needs them any more."""
        with self._lock:
            for lease in meta.within_step if meta is not None else ():
                self._loads.pop(lease, None)
