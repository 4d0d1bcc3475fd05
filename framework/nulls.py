"""Null objects for the parts that an engine may do without: they answer so that nobody asks `is it there?`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import SchedulerOutput
    from framework.interfaces import Backend, KVSpec
    from framework.request import Request


class NoConnector:
    """A KV connector that holds nothing and moves nothing; a base for those that do a part of it."""

    layerwise = False

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        return None

    def build_meta(self, scheduled: SchedulerOutput) -> Any:
        return None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return False

    def request_preempted(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        return False

    def step_lost(self, meta: Any) -> None:
        return None

    def bind(self, backend: Backend, kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> None:
        return None

    def start_load(self, meta: Any) -> None:
        return None

    def wait_layer(self, layer: int) -> None:
        return None

    def save_layer(self, layer: int) -> None:
        return None

    def wait_saves(self, meta: Any) -> None:
        return None

    def idle(self) -> None:
        return None

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        return (), ()

    def failed_blocks(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        return None
