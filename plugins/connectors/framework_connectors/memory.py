"""`kv_connector=memory`: KV blocks in host memory, shared by the engines of one process.

A prefill engine and a decode engine that name the same store hand KV over; one engine alone gets a second level behind
its prefix cache. One object serves both sides of the contract; what they share is under one lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from framework.errors import ConfigError
from framework.scheduler import extend_hashes
from framework_connectors.block_store import store_named

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import SchedulerOutput
    from framework.interfaces import Backend, ConnectorContext, KVSpec
    from framework.request import Request
    from framework_connectors.options import MemoryOptions

_log = logging.getLogger("framework")
_IDLE_S = 0.01


@dataclass(slots=True)
class Load:
    """Blocks of one stay that are filled from the store: blocks[i] gets what stands under keys[i]."""

    lease: int
    keys: list[Hashable]
    blocks: list[int]


@dataclass(slots=True)
class Save:
    """A block of one stay that goes to the store."""

    lease: int
    key: Hashable
    block: int


@dataclass(slots=True)
class MemoryMeta:
    """What the worker side does in one step. It takes out of the lists what it has done."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(slots=True)
class _Stay:
    """num_planned: blocks from the first on that are in the store, or on their way there."""

    request: Request
    num_planned: int = 0


class MemoryConnector:
    """`interfaces.KVConnector` over a `BlockStore`.

    A block is stored after the step that committed it, under (identity of the engine's KV, chained prefix key, group).
    The blocks of a stay are kept beyond its end while some of them are still to be stored.
    """

    layerwise = False

    def __init__(self, options: MemoryOptions, ctx: ConnectorContext) -> None:
        """Raises ConfigError when no block fits, or when the store is there with another capacity."""
        if options.capacity_bytes < ctx.block_bytes:
            raise ConfigError(
                f"kv_connector.capacity_bytes={options.capacity_bytes} holds no block: one takes {ctx.block_bytes}. "
                "Raise it, or use kv_connector=none"
            )
        self._ctx, self._is_async = ctx, options.async_loads
        self._store = store_named(options.store, options.capacity_bytes)
        self._stays: dict[int, _Stay] = {}  # by lease
        self._next = MemoryMeta()
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        # Under `_changed`, for both sides:
        self._num_unsaved: dict[int, int] = {}  # by lease: blocks on their way to the store
        self._ended: set[int] = set()  # leases of stays that ended with some
        self._num_loading = 0
        self._received: list[int] = []
        self._failed: list[int] = []

    # -------------------------------------------------------------------------------------- scheduler side

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        first, last = num_computed_tokens // self._ctx.block_size, (request.num_tokens - 1) // self._ctx.block_size
        extend_hashes(request, last, self._ctx.block_size)
        count = 0
        while first + count < last and all(key in self._store for key in self._keys(request, first + count)):
            count += 1
        return count * self._ctx.block_size, self._is_async and count > 0

    def after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        self._stays[request.lease] = _Stay(request)
        if not num_external_tokens:
            return
        last = request.num_computed_tokens // self._ctx.block_size
        indices = range(last - num_external_tokens // self._ctx.block_size, last)
        keys = [key for index in indices for key in self._keys(request, index)]
        self._store.touch(keys)
        self._next.loads.append(Load(request.lease, keys, [group[index] for index in indices for group in blocks]))

    def build_meta(self, scheduled: SchedulerOutput) -> MemoryMeta | None:
        for stay in self._stays.values():
            if stay.request.num_published_blocks > stay.num_planned:
                self._plan_saves(stay, stay.request.block_ids)
        if not self._next.loads and not self._next.saves:
            return None
        meta, self._next = self._next, MemoryMeta()
        return meta

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return self._end(request, blocks)

    def request_preempted(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return self._end(request, blocks)

    def step_lost(self, meta: MemoryMeta | None) -> None:
        if meta is None:
            return
        with self._changed:
            self._count_saved(meta.saves)
            for load in meta.loads if self._is_async else ():
                self._failed += load.blocks
                self._received.append(load.lease)
        meta.saves, meta.loads = [], []

    def _end(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """Ends a stay; True while blocks of it are on their way to the store."""
        stay = self._stays.pop(request.lease, None)
        if stay is None:
            return False
        self._plan_saves(stay, blocks)
        with self._changed:
            if not self._num_unsaved.get(request.lease):
                return False
            self._ended.add(request.lease)
            return True

    def _plan_saves(self, stay: _Stay, blocks: Sequence[Sequence[int]]) -> None:
        request, first = stay.request, stay.num_planned
        stay.num_planned = request.num_published_blocks
        extend_hashes(request, stay.num_planned, self._ctx.block_size)
        saves = [
            Save(request.lease, key, group[index])
            for index in range(first, stay.num_planned)
            for key, group in zip(self._keys(request, index), blocks, strict=True)
            if key not in self._store
        ]
        if saves:
            self._next.saves += saves
            with self._changed:
                self._num_unsaved[request.lease] = self._num_unsaved.get(request.lease, 0) + len(saves)

    def _keys(self, request: Request, index: int) -> list[Hashable]:
        """Keys of the request's block at `index`, one a KV group."""
        digest = request.block_hashes[index]
        return [(self._ctx.identity, digest, group) for group in range(self._ctx.num_groups)]

    # ----------------------------------------------------------------------------------------- worker side

    def bind(self, backend: Backend, kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> None:
        self._backend, self._kv, self._specs = backend, kv, specs

    def start_load(self, meta: MemoryMeta | None) -> None:
        while meta is not None and meta.loads:
            if self._is_async:
                self._start_beside(meta.loads[0])
            else:
                self._load(meta.loads[0])
            del meta.loads[0]

    def wait_layer(self, layer: int) -> None:
        """Nothing: loads within the step are done before the forward pass."""

    def save_layer(self, layer: int) -> None:
        """Nothing: blocks are stored whole, after the forward pass."""

    def wait_saves(self, meta: MemoryMeta | None) -> None:
        if meta is None or not meta.saves:
            return
        layers = self._backend.gather_blocks(self._kv, self._specs, [save.block for save in meta.saves])
        for i, save in enumerate(meta.saves):
            self._store.put(save.key, [layer[i].clone() for layer in layers])  # a view would keep all of them
        with self._changed:
            self._count_saved(meta.saves)
        meta.saves = []

    def idle(self) -> None:
        with self._changed:
            if self._num_loading and not self._received:
                self._changed.wait(_IDLE_S)

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        with self._changed:
            sent = [lease for lease in self._ended if not self._num_unsaved.get(lease)]
            self._ended.difference_update(sent)
            received, self._received = self._received, []
        return sent, received

    def failed_blocks(self) -> Sequence[int]:
        with self._changed:
            failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start_beside(self, load: Load) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="framework-kv-load")
        with self._changed:
            self._num_loading += 1
        self._pool.submit(self._load_beside, load)

    def _load_beside(self, load: Load) -> None:
        try:
            self._load(load)
        except Exception:
            _log.exception("kv_connector=memory: a load failed, and its request is computed instead")
            with self._changed:
                self._failed += load.blocks
        with self._changed:
            self._num_loading -= 1
            self._received.append(load.lease)
            self._changed.notify_all()

    @torch.inference_mode()
    def _load(self, load: Load) -> None:
        """Fills the load's blocks; those whose key had to go are failed."""
        found = [(block, self._store.get(key)) for block, key in zip(load.blocks, load.keys, strict=True)]
        there = [(block, stored) for block, stored in found if stored is not None]
        if there:
            layers = [torch.stack(tensors) for tensors in zip(*(stored for _, stored in there), strict=True)]
            self._backend.scatter_blocks(self._kv, self._specs, [block for block, _ in there], layers)
        if len(there) < len(found):
            with self._changed:
                self._failed += [block for block, stored in found if stored is None]

    def _count_saved(self, saves: Sequence[Save]) -> None:
        """Under the lock: these are not on their way any more."""
        for save in saves:
            self._num_unsaved[save.lease] -= 1
            if not self._num_unsaved[save.lease]:
                del self._num_unsaved[save.lease]
