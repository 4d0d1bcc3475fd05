"""State of stages that no token tells: it outlives the row of a preempted request and comes back with the request.

What a stage can work out from the known tokens of a request that returns, it writes in `add_request`. Fields that it
declares as `lasting` are copied when the request yields its row, and written behind what `add_request` left there. All
of it happens on the device, in the order of the steps. Called by the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import NewRequest
    from framework.sampling.deployed import Deployed

MAX_KEPT = 4096
"""Requests whose state is kept at most, the latest ones: nobody tells of those that are aborted while they wait."""


class LastingState:
    """Lasting fields of the stages of one pipeline, by request id while their requests have no row."""

    def __init__(self, stages: Sequence[Deployed]) -> None:
        self._columns = [one.ctx.column(f.name) for one in stages for f in one.spec.fields if f.lasting]
        self._request_ids: dict[int, str] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self._returning: dict[int, list[Tensor]] = {}

    def add(self, new: NewRequest) -> None:
        """The request has the row. Its state, if it has drawn tokens before, is there after `give_back`."""
        if not self._columns:
            return
        self._request_ids[new.req_idx] = new.request_id
        self._returning.pop(new.req_idx, None)
        kept = self._kept.pop(new.request_id, None)
        if kept is not None and len(new.token_ids) > new.num_prompt_tokens:  # else the id is another request's by now
            self._returning[new.req_idx] = kept

    def give_back(self) -> None:
        """Writes the state of requests that came back, once their rows are on the device."""
        for req_idx, values in self._returning.items():
            for column, value in zip(self._columns, values, strict=True):
                column.dev[req_idx] = value
        self._returning = {}

    def preempt(self, req_idx: int) -> None:
        """The request of the row yields it, and will come back."""
        request_id = self._request_ids.get(req_idx)
        if request_id is None:
            return
        # A step that failed may have left the row without what came back with it.
        kept = self._returning.pop(req_idx, None)
        self._kept[request_id] = kept or [column.dev[req_idx].clone() for column in self._columns]
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def release(self, req_idx: int) -> None:
        """The row is nobody's."""
        self._request_ids.pop(req_idx, None)
        self._returning.pop(req_idx, None)
