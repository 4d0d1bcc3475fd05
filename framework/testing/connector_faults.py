"""`kv_connector=faulty`: a connector that stands around another one and does to it what networks and disks do.

Whoever builds an engine can put it into the config, and must get the same tokens with it and without it. Every fault is
one that the contract allows; decisions fall on the scheduler side and travel to the worker side with the step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.config import build_options
from framework.engine.connecting import is_layerwise
from framework.plugins import registry

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import SchedulerOutput
    from framework.interfaces import Backend, ConnectorContext, KVConnector, KVSpec
    from framework.request import Request
    from framework.testing.fault_options import FaultOptions

Blocks = Sequence[Sequence[int]]


@dataclass(slots=True)
class FaultMeta:
    """What one step brings to the worker side.

    inner     metadata of the inner connector
    spoilt    blocks of loads within the step that come to nothing
    dropped   leases of asynchronous loads that the inner connector never hears of
    silent    leases of kept stays of which the inner connector has nothing to report
    """

    inner: Any = None
    spoilt: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Ended:
    """A stay that has ended, as it was then; the inner connector hears of it in `steps_left` steps."""

    stay: Request
    blocks: Blocks
    is_preempted: bool
    steps_left: int


def _inner(options: FaultOptions) -> tuple[Any, Any]:
    """Class and options of the connector that is named. PluginError and ConfigError as for one that is chosen."""
    plugins = registry()
    options_class = plugins.load_config_class(plugins.spec("kv_connector", options.inner, "kv_connector.inner"))
    inner_options = build_options(options_class, options.inner_options, "kv_connector.inner_options")
    return plugins.load_target("kv_connector", options.inner), inner_options


class FaultyConnector:
    """`interfaces.KVConnector` around another one. Stores happen at the end of a stay, so that they can be late."""

    @classmethod
    def is_layerwise(cls, options: FaultOptions) -> bool:
        """Whether the inner one is."""
        return is_layerwise(options.inner, *_inner(options))

    def __init__(self, options: FaultOptions, ctx: ConnectorContext) -> None:
        target, inner_options = _inner(options)
        self._inner: KVConnector = target(inner_options, ctx)
        self.layerwise = self._inner.layerwise
        self._options, self._block_size = options, ctx.block_size
        self._random, self._worker_random = random.Random(options.seed), random.Random(options.seed + 1)
        self._is_async = False  # the last answer about a match
        self._stays: dict[int, Request] = {}  # by lease, as they began
        self._ended: list[_Ended] = []
        self._next = FaultMeta()
        self._sent: list[int] = []
        self._received: list[int] = []
        self._failed: list[int] = []
        self._lock = threading.Lock()
        self._spoilt_loads: dict[int, list[int]] = {}  # by lease: blocks of asynchronous loads that come to nothing

    # -------------------------------------------------------------------------------------- scheduler side

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, self._is_async = self._inner.matched_tokens(request, num_computed_tokens)
        return count, self._is_async

    def after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        stay = self._stays[request.lease] = copy(request)
        stay.block_hashes = list(request.block_hashes)
        if num_external_tokens and self._happens(self._options.dropped_loads):
            self._spoil(request.lease, self._blocks_of_load(request, blocks, num_external_tokens))
            if self._is_async:
                self._next.dropped.append(request.lease)
            num_external_tokens = 0
        elif num_external_tokens and self._happens(self._options.failed_loads):
            self._spoil(
                request.lease, [self._random.choice(self._blocks_of_load(request, blocks, num_external_tokens))]
            )
        self._inner.after_alloc(stay, blocks, num_external_tokens)

    def build_meta(self, scheduled: SchedulerOutput) -> FaultMeta:
        due = [one for one in self._ended if one.steps_left <= 0]
        self._ended = [one for one in self._ended if one.steps_left > 0]
        for one in self._ended:
            one.steps_left -= 1
        for one in due:
            if not self._tell(one):
                self._next.silent.append(one.stay.lease)
        meta, self._next = self._next, FaultMeta()
        meta.inner = self._inner.build_meta(scheduled)
        return meta

    def request_finished(self, request: Request, blocks: Blocks) -> bool:
        return self._end(request, blocks, is_preempted=False)

    def request_preempted(self, request: Request, blocks: Blocks) -> bool:
        return self._end(request, blocks, is_preempted=True)

    def step_lost(self, meta: FaultMeta) -> None:
        self._inner.step_lost(meta.inner)
        self._report(meta)
        meta.inner = None

    def _end(self, request: Request, blocks: Blocks, is_preempted: bool) -> bool:
        stay = self._stays.pop(request.lease)
        if not self._happens(self._options.dropped_saves):
            stay.num_published_blocks, stay.token_ids = request.num_published_blocks, list(request.token_ids)
        ended = _Ended(stay, [list(group) for group in blocks], is_preempted, self._options.late_saves)
        if not ended.steps_left:
            return self._tell(ended)
        self._ended.append(ended)
        return True

    def _tell(self, ended: _Ended) -> bool:
        """What the inner connector says of a stay that has ended."""
        tell = self._inner.request_preempted if ended.is_preempted else self._inner.request_finished
        return tell(ended.stay, ended.blocks)

    def _happens(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def _blocks_of_load(self, request: Request, blocks: Blocks, num_external_tokens: int) -> list[int]:
        last = request.num_computed_tokens // self._block_size
        first = last - num_external_tokens // self._block_size
        return [group[index] for index in range(first, last) for group in blocks]

    def _spoil(self, lease: int, blocks: list[int]) -> None:
        if self._is_async:
            with self._lock:
                self._spoilt_loads[lease] = blocks
        else:
            self._next.spoilt += blocks

    # ----------------------------------------------------------------------------------------- worker side

    def bind(self, backend: Backend, kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> None:
        self._backend, self._kv, self._specs = backend, kv, specs
        self._inner.bind(backend, kv, specs)

    def start_load(self, meta: FaultMeta) -> None:
        self._inner.start_load(meta.inner)
        self._report(meta)
        self._poison(meta.spoilt)
        meta.spoilt = []

    def wait_layer(self, layer: int) -> None:
        self._inner.wait_layer(layer)

    def save_layer(self, layer: int) -> None:
        self._inner.save_layer(layer)

    def wait_saves(self, meta: FaultMeta) -> None:
        self._inner.wait_saves(meta.inner)

    def idle(self) -> None:
        self._inner.idle()

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        sent, received = self._inner.finished()
        with self._lock:
            self._sent += sent
            self._received += received
            sent, received = self._out_of_order(self._sent), self._out_of_order(self._received)
            spoilt = [block for lease in received for block in self._spoilt_loads.pop(lease, ())]
        self._poison(spoilt)
        return sent, received

    def failed_blocks(self) -> Sequence[int]:
        failed, self._failed = self._failed, []
        return [*failed, *self._inner.failed_blocks()]

    def close(self) -> None:
        self._inner.close()

    def _report(self, meta: FaultMeta) -> None:
        """Puts what a step's metadata says of dropped loads and silent stays among the reports, once."""
        with self._lock:
            self._received += meta.dropped
            self._sent += meta.silent
        meta.dropped, meta.silent = [], []

    def _out_of_order(self, reports: list[int]) -> list[int]:
        """Takes all reports out of the list; with `reorder` some of them, the last ones first."""
        count = len(reports)
        if self._options.reorder:
            self._worker_random.shuffle(reports)
            count = self._worker_random.randint(0, count)
        taken = reports[:count]
        del reports[:count]
        return taken

    def _poison(self, blocks: Sequence[int]) -> None:
        """Fills blocks with NaN and reports them: whoever reads them all the same gives himself away."""
        if blocks:
            data = [layer.fill_(float("nan")) for layer in self._backend.gather_blocks(self._kv, self._specs, blocks)]
            self._backend.scatter_blocks(self._kv, self._specs, blocks, data)
            self._failed += blocks
