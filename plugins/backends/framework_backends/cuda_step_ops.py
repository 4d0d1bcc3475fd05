"""The step's array functions on a CUDA device, a launch each: what they mean is written in `framework.step_ops`.

Nothing here waits for the device, and all but `prepare` and the staged writes can be captured. The kernels are in
`triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from framework_backends.triton.inbox import receive
from framework_backends.triton.post_update import PostUpdate
from framework_backends.triton.prepare import Prepare
from framework_backends.triton.staged import apply_rows, apply_spans

if TYPE_CHECKING:
    from torch import Tensor

    from framework.step_ops import StepBuffers, TableViews


class CudaStepOps:
    """`interfaces.StepOps` in Triton. Keeps the launches of the buffers and table that it saw last.

    Values for `apply_rows` and `apply_spans` are on the device already, or on their way there in the current stream.
    """

    def __init__(self) -> None:
        self._launches: Launches | None = None

    def apply_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        apply_rows(table, rows, values)

    def apply_spans(self, flat: Tensor, starts: Sequence[int], counts: Sequence[int], values: Tensor) -> None:
        apply_spans(flat, starts, counts, values)

    def prepare(
        self,
        buffers: StepBuffers,
        table: TableViews,
        num_rows: int,
        num_tokens: int,
        num_logits: int,
        goes_on: bool,
    ) -> None:
        """Reads everything anew, whether the step goes on or not: it is one launch both ways."""
        self._of(buffers, table).prepare.any_step(num_rows, num_tokens, num_logits)

    def receive(self, told: Tensor, ring: Tensor, turn: Tensor, num_rows: int) -> None:
        receive(told, ring, turn, num_rows)

    def prepare_decodes(self, buffers: StepBuffers, table: TableViews, num_rows: int) -> None:
        self._of(buffers, table).prepare.decodes(num_rows)

    def prepare_ragged(
        self, buffers: StepBuffers, table: TableViews, num_rows: int, num_tokens: int, num_logits: int
    ) -> None:
        """num_tokens differs from num_rows: a launch for one token a row is another one."""
        assert num_tokens != num_rows, f"{num_tokens} tokens and rows"
        self._of(buffers, table).prepare.any_step(num_rows, num_tokens, num_logits)

    def post_update(
        self, buffers: StepBuffers, table: TableViews, num_rows: int, num_logits: int, sampled: Tensor
    ) -> None:
        self._of(buffers, table).post_update(num_rows, num_logits, sampled)

    def _of(self, buffers: StepBuffers, table: TableViews) -> Launches:
        """The launches over an engine's memory, made anew where another one of this backend has stepped between."""
        launches = self._launches
        if launches is None or launches.buffers is not buffers or launches.table is not table:
            launches = self._launches = Launches(buffers, table)
        return launches


class Launches:
    """The launches over one engine's step buffers and request table."""

    def __init__(self, buffers: StepBuffers, table: TableViews) -> None:
        self.buffers, self.table = buffers, table
        self.prepare = Prepare(buffers, table)
        self.post_update = PostUpdate(buffers, table)
