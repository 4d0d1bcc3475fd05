"""One row a request, from admission to its end: every device column that the core, a stage or a drafter declared.

Rows never move. Narrow columns share one packed row, so an admission is one copy whatever the number of columns; a
reused row is overwritten whole. The scheduler decides rows; the runner writes them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.batch import NULL_BLOCK, NULL_ROW, BlockDelta, Field, NewRequest
from framework.errors import PluginError
from framework.sent import sent
from framework.step_ops import TableViews
from framework.worker.pooled_column import PooledColumn

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.interfaces import KVGroup, StepOps

_TORCH = {
    "float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint64": torch.int64, "bool": torch.bool,
}  # fmt: skip
_WIDE = 64
"""Columns wider than this keep their own memory: copying them with every row would cost more than a second copy."""

CORE_FIELDS = (Field("num_tokens", "int32"), Field("num_computed_tokens", "int32"), Field("seed", "uint64"))


class TableColumn:
    """A declared field: host mirror `np`, device tensor `dev`. Usable once the table is allocated."""

    __slots__ = ("dev", "field", "np")

    def __init__(self, declared: Field) -> None:
        self.field = declared
        self.np: NDArray[Any]
        self.dev: Tensor


class RequestTable:
    """Declared columns, known token ids and block tables of up to `num_rows` requests (row 0 is nobody's)."""

    def __init__(
        self, num_rows: int, max_model_len: int, device: torch.device, ops: StepOps, *, pools_stay: bool = False
    ) -> None:
        """pools_stay: a pool that is used has places for all rows at once, since moving it would cost more than memory:
        steps that were captured know where it is."""
        self.num_rows, self.max_model_len, self.device = num_rows, max_model_len, device
        self._least_places = num_rows if pools_stay else 2
        self._ops = ops
        self._columns: dict[str, TableColumn] = {}
        self._pools: dict[str, PooledColumn] = {}
        self._staged: dict[int, NDArray[np.int32]] = {}  # by row: what a failed step left behind is overwritten
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.declare("core", CORE_FIELDS)

    def declare(self, owner: str, fields: Sequence[Field]) -> None:
        """Adds columns before the table is allocated."""
        for f in fields:
            key = f"{owner}.{f.name}"
            if key in self._columns:
                raise PluginError(f"field '{key}' is declared twice; give the second stage another name")
            if f.dtype not in _TORCH:
                raise PluginError(f"field '{key}' has dtype '{f.dtype}'; use one of {', '.join(_TORCH)}")
            self._columns[key] = column = TableColumn(Field(f.name, "int32") if f.pooled else f)
            if f.pooled:
                self._pools[key] = PooledColumn(f, column, _TORCH[f.dtype], self.device, self._least_places)

    def column(self, owner: str, name: str) -> Any:
        """The field as its owner sees it: a `batch.PooledColumn` when it was declared as pooled, else a `Column`."""
        key = f"{owner}.{name}"
        return self._pools.get(key) or self._columns[key]

    def allocate(self, groups: Sequence[KVGroup]) -> None:
        """Lays out the packed row, largest items first so that all are aligned, and makes the columns usable.

        A block table a KV group is made with it.
        """
        widths = [-(-self.max_model_len // g.block_size) for g in groups]
        shapes = [(self.num_rows, width) for width in widths]
        self.block_table = tuple(torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in shapes)
        narrow = [c for c in self._columns.values() if c.field.width <= _WIDE]
        narrow.sort(key=lambda c: -np.dtype(c.field.dtype).itemsize)
        offsets, end = [], 0
        for c in narrow:
            offsets.append(end)
            end += np.dtype(c.field.dtype).itemsize * c.field.width
        row_bytes = -(-end // 8) * 8
        self._arena_np = np.zeros((self.num_rows, row_bytes), np.uint8)
        self._arena = torch.zeros(self.num_rows, row_bytes, dtype=torch.uint8, device=self.device)
        for c, offset in zip(narrow, offsets, strict=True):
            self._bind(c, offset, row_bytes)
        self._wide = [c for c in self._columns.values() if c.field.width > _WIDE]
        for c in self._wide:
            shape = (self.num_rows, c.field.width)
            c.np = np.full(shape, c.field.init, c.field.dtype)
            c.dev = torch.zeros(shape, dtype=_TORCH[c.field.dtype], device=self.device)
        self._upload(np.arange(self.num_rows))  # these two also compile what writes, which no request shall wait for
        self._spans(self.token_ids, [0], [1], np.zeros(1, np.int32))
        core = {f.name: self.column("core", f.name) for f in CORE_FIELDS}
        self.views = TableViews(token_ids=self.token_ids, block_table=self.block_table, **core)
        self._num_tokens, self._num_computed, self._seed = (core[f.name].np for f in CORE_FIELDS)

    def _bind(self, c: TableColumn, offset: int, row_bytes: int) -> None:
        size, width = np.dtype(c.field.dtype).itemsize, c.field.width
        shape, strides = ((self.num_rows, width), (row_bytes, size)) if width > 1 else ((self.num_rows,), (row_bytes,))
        c.np = np.ndarray(shape, c.field.dtype, self._arena_np.data, offset, strides)
        c.np[:] = c.field.init
        view = self._arena.view(_TORCH[c.field.dtype])[:, offset // size : offset // size + width]
        c.dev = view if width > 1 else view[:, 0]

    def add(self, new: NewRequest) -> None:
        """Writes the core's part of a row on the host; the owners of the other columns write theirs before `apply`."""
        row = new.req_idx
        assert row != NULL_ROW, "row 0 is reserved for padding"
        self._num_tokens[row] = len(new.token_ids)
        self._num_computed[row] = new.num_computed_tokens
        self._seed[row] = np.uint64(new.seed % 2**64)
        self._staged[row] = new.token_ids

    def apply(self) -> None:
        """Sends staged rows and their token ids to the device."""
        if not self._staged:
            return
        self._upload(np.array(list(self._staged)))
        starts = [row * self.max_model_len for row in self._staged]
        tokens = list(self._staged.values())
        self._spans(self.token_ids, starts, [len(t) for t in tokens], np.concatenate(tokens))
        self._staged = {}
        for pool in self._pools.values():
            pool.apply()

    def append_blocks(self, deltas: Sequence[BlockDelta]) -> None:
        """Sends new block-table entries to the device, behind the rows of requests that arrive."""
        for table, delta in zip(self.block_table, deltas, strict=True):
            if len(delta.ids):
                starts = (delta.rows.astype(np.int64) * table.shape[1] + delta.starts).tolist()
                self._spans(table, starts, delta.counts.tolist(), delta.ids)

    def _spans(self, table: Tensor, starts: list[int], counts: list[int], values: NDArray[np.int32]) -> None:
        self._ops.apply_spans(table.view(-1), starts, counts, sent(values, self.device))

    def _upload(self, rows: NDArray[Any]) -> None:
        index = sent(rows, self.device)
        self._ops.apply_rows(self._arena, index, sent(self._arena_np[rows], self.device))
        for table in self.block_table:  # behind a request's last block stands the null block, never somebody else's
            table.index_fill_(0, index, NULL_BLOCK)
        for c in self._wide:
            c.dev[index] = sent(c.np[rows], self.device).view(c.dev.dtype)
