"""Dense products on a CUDA device: which kernel multiplies how many rows by a weight of which shape.

A product of few rows is bound by reading the weight and runs in a kernel of ours, with norm, residual, bias and gate in
the same launch; many rows run in cuBLAS between elementwise kernels. One copy of the weight, as the checkpoint has it,
serves both. Batch-invariant products keep one order of summation for any number of rows. The kernels are in `triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from framework.interfaces import Linear
from framework_backends.triton import activations, norms
from framework_backends.triton.launches import is_interpreted, launch_words, launches_dependent, pays
from framework_backends.triton.matrices import matrix_kernel
from framework_backends.triton.products import Row, Target, few_rows_kernel, gemv_kernel
from framework_backends.triton.splits import split_kernel
from framework_backends.triton.wide import wide_kernel

FEW, SOME = 16, 64
"""Most rows of `few_rows_kernel`, for which those of one matrix instruction cost the same, and of `split_kernel`."""


class CudaLinearPacker:
    """`Backend.pack_linear` of a CUDA device: products that are fast, or whose rows do not depend on their number."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self._dependent = launches_dependent()

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A product [T, in] -> [T, out] of weight [out, in]; the fast ones have `interfaces.FusesNorm` and `Gates` as
        well, and all have `Widens`."""
        weight = weight.contiguous()
        if self._batch_invariant:
            return InvariantLinear(weight, bias, dependent=self._dependent)
        return CudaLinear(weight, bias, choose_tiles(weight.dtype, *weight.shape), dependent=self._dependent)


# -------------------------------------------------------------------------------------------------------- wide products


@dataclass(frozen=True)
class WideTiles:
    """A tile of `wide_kernel`: rows, outputs, columns side by side, warps."""

    rows: int
    outputs: int
    columns: int
    warps: int


WIDE_TILES = WideTiles(8, 4, 256, warps=4)
"""Of any number of rows where bits are not to depend on it."""
_FEW_WIDE, _FEW_WIDE_TILES, _MANY_WIDE_TILES = 4, WideTiles(1, 1, 1024, warps=4), WideTiles(8, 8, 128, warps=4)
_MOST_WIDE = 1 << 26
"""Pairs of numbers to multiply up to which `wide_kernel` is faster than a library's product of rows in float32."""


def choose_wide_tiles(num_rows: int) -> WideTiles:
    """Tiles for so many rows: for very few of them a program has one output of one row."""
    if num_rows <= _FEW_WIDE:
        return _FEW_WIDE_TILES
    return WIDE_TILES if num_rows <= SOME else _MANY_WIDE_TILES


def most_wide_rows(outputs: int, columns: int) -> int:
    """Rows up to which `wide_kernel` multiplies by a weight [outputs, columns]: SOME, or a larger power of 2, since
    kernels part where the backend compiles ahead."""
    return max(SOME, (1 << (_MOST_WIDE // (outputs * columns)).bit_length()) >> 1)


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: WideTiles, *, dependent: bool) -> Tensor:
    """[T, out] float32 of x [T, in] of 16 bits and a float32 weight [out, in], in one launch."""
    assert x.stride(1) == 1, f"rows must be contiguous, strides are {x.stride()}"
    num_rows, (outputs, columns) = len(x), weight.shape
    y = torch.empty(num_rows, outputs, dtype=torch.float32, device=x.device)
    wide_kernel[(triton.cdiv(outputs, tiles.outputs), triton.cdiv(num_rows, tiles.rows))](
        x, x.stride(0), weight, bias, y, num_rows, N=outputs, K=columns, BM=tiles.rows, BN=tiles.outputs,
        BK=tiles.columns, num_warps=tiles.warps, **launch_words(pays(dependent, num_rows)),
    )  # fmt: skip
    return y


# -------------------------------------------------------------------------------------------------------- fast products


@dataclass(frozen=True)
class RowTiles:
    """How `gemv_kernel` shares out a weight: outputs to a program, columns to a piece, pieces asked for ahead.

    in_turn  whether pieces take turns in a program's registers (`plus_product`). Else more of them may be on the way,
             which is quicker where programs are so few that there are registers for all
    """

    outputs: int
    columns: int
    warps: int
    ahead: int
    in_turn: bool = True


@dataclass(frozen=True)
class FewTiles:
    """How `few_rows_kernel` shares out a weight: rows of it to a program, warps that share out the columns of a piece,
    32 times `blocks` to each, and pieces asked for ahead."""

    rows: int
    warps: int
    blocks: int
    ahead: int


@dataclass(frozen=True)
class SplitTiles:
    """How `split_kernel` shares out a weight: rows of it and columns of a piece, programs that share a tile, and pieces
    on the way at a time."""

    rows: int
    columns: int
    parts: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Tiles for one row, for 2 to FEW rows, and for FEW + 1 to SOME; None where torch multiplies."""

    one: RowTiles | None = None
    few: FewTiles | SplitTiles | None = None
    some: SplitTiles | None = None


def choose_tiles(dtype: torch.dtype, rows: int, columns: int) -> Tiles:
    """Tiles for a weight [rows, columns] of 16 bits, if its rows begin at vectors of 16 bytes; none for others."""
    if dtype.itemsize != 2 or columns % 8:
        return Tiles()
    return Tiles(_one_row(rows, columns), _few_rows(rows, columns), _some_rows(rows, columns))


_HEAD_ROWS = 65536  # vocabularies: so many programs that each may have little in flight
_WIDE = 4096  # columns from which on cuBLAS reads a weight as fast as a device can, for two rows and more


def _one_row(rows: int, columns: int) -> RowTiles:
    """Measured on one H200, microseconds beside those of cuBLAS (weights cold in cache, back to back in a graph).

    4096 x 1024 3.9 (5.0), 1024 x 2048 2.0 (12.7), 2 * 3072 x 1024 4.6 (5.6), 1024 x 3072 2.5 (6.7), 151936 x 1024 71
    (75), 6144 x 4096 13.9 (15.4), 4096 x 4096 8.8 (12.6), 2 * 14336 x 4096 54.7 (55.4), 4096 x 14336 26.7 (30.5),
    128256 x 4096 230 (243); norm and gate included where a layer has them.
    """
    width = triton.next_power_of_2(columns)
    if rows >= _HEAD_ROWS:
        outputs = 8 if columns <= 1024 else 4
        return RowTiles(outputs, min(width, 1024), warps=4, ahead=4)
    if columns <= 1024:
        return RowTiles(4, width, warps=4, ahead=1)
    return RowTiles(2, 1024 if columns < _WIDE and columns % 2048 else 2048, warps=4, ahead=3)


def _few_rows(rows: int, columns: int) -> FewTiles | SplitTiles | None:
    """As `_one_row`, for 16 rows; the times of cuBLAS have the gate's launch where a layer has one.

    4096 x 1024 4.1 (5.0), 1024 x 2048 3.3 (6.1), 2 * 3072 x 1024 5.5 (7.0), 1024 x 3072 4.1 (7.0), 2 * 14336 x 4096
    58.3 (58.9), 4096 x 14336 30.1 (31.6), 151936 x 1024 77 (79), 128256 x 4096 244 (249). For 6144 x 4096 and
    4096 x 4096, 14.9 (15.5) and 11.6 (12.5), cuBLAS is quicker between kernels that do not overlap.
    """
    if rows >= _HEAD_ROWS:
        return SplitTiles(128, 64, parts=1, stages=3) if columns < _WIDE else SplitTiles(64, 64, parts=1, stages=5)
    if columns < _WIDE:
        return FewTiles(16, 2, blocks=16, ahead=2) if columns <= 1024 else FewTiles(16, 4, blocks=8, ahead=3)
    if columns >= 2 * _WIDE:
        return SplitTiles(64, 128, parts=4, stages=3)
    return SplitTiles(128, 128, parts=1, stages=2) if rows >= 4 * _WIDE else None


def _some_rows(rows: int, columns: int) -> SplitTiles | None:
    """As `_few_rows`, for 64 rows: 2 * 3072 x 1024 6.6 (7.3), 2 * 14336 x 4096 60.7 (63.8), 4096 x 14336 33.3 (35.4),
    151936 x 1024 88 (93), 128256 x 4096 257 (275). What is not there was 5 to 30 % slower than cuBLAS."""
    if columns < _WIDE:
        if rows >= _HEAD_ROWS:
            return SplitTiles(128, 64, parts=1, stages=3)
        return SplitTiles(64, 128, parts=1, stages=3) if rows >= 6144 else None
    if columns >= 2 * _WIDE:
        return SplitTiles(64, 128, parts=2, stages=4)
    return SplitTiles(128, 64, parts=1, stages=3) if rows >= 4 * _WIDE else None


class CudaLinear:
    """A product that takes its neighbours into its launch: `interfaces.Linear`, `FusesNorm` and `Gates`.

    One row takes residual, norm, bias and gate along; 2 to SOME rows bias and gate, behind a launch for the norm. It is
    for one stream at a time, as programs of a launch count one another in memory.
    """

    __slots__ = ("_bias", "_counters", "_dependent", "_tiles", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Tiles, *, dependent: bool) -> None:
        self._weight, self._bias, self._tiles, self._dependent = weight, bias, tiles, dependent
        heights = [one.rows for one in (tiles.few, tiles.some) if isinstance(one, SplitTiles)]
        # halves of odd numbers are one more
        num_tiles = triton.cdiv(weight.shape[0], min(heights)) + 1 if heights else 0
        self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._in_one_launch(x, gated=False)
        return functional.linear(x, self._weight, self._bias) if product is None else product

    def widened(self, x: Tensor) -> Tensor:
        """See `interfaces.Widens`."""
        if x.dtype == torch.float32 or not 0 < len(x) <= most_wide_rows(*self._weight.shape):
            return self(x.float())
        return wide_product(x, self._weight, self._bias, choose_wide_tiles(len(x)), dependent=self._dependent)

    def after_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `interfaces.FusesNorm`."""
        if len(x) == 1 and self._tiles.one is not None:
            return self._one_after_norm(self._tiles.one, x, residual, weight, eps, gated=False)
        normed, stream = self._norm(x, residual, weight, eps)
        return self(normed), stream

    def gated_after_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `interfaces.FusesNorm`."""
        if len(x) == 1 and self._tiles.one is not None:
            return self._one_after_norm(self._tiles.one, x, residual, weight, eps, gated=True)
        normed, stream = self._norm(x, residual, weight, eps)
        return self.gated(normed), stream

    def gated(self, x: Tensor) -> Tensor:
        """See `interfaces.Gates`."""
        product = self._in_one_launch(x, gated=True)
        if product is None:
            product = activations.silu_and_mul(self(x), dependent=pays(self._dependent, len(x)))
        return product

    def _in_one_launch(self, x: Tensor, *, gated: bool) -> Tensor | None:
        """The product by a kernel of ours; None where there are too many rows, or no tiles."""
        assert x.stride(1) == 1, f"rows must be contiguous, strides are {x.stride()}"
        if len(x) == 1 and self._tiles.one is not None:
            return self._one(self._tiles.one, Row(x, None, None, None, None), gated=gated)
        tiles = None
        if 1 < len(x) <= SOME:
            tiles = self._tiles.few if len(x) <= FEW else self._tiles.some
        if tiles is None:
            return None
        if isinstance(tiles, SplitTiles):
            return self._split(tiles, x, gated=gated)
        return self._few(tiles, x, gated=gated)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            return norms.rms_norm(x, weight, eps, dependent=pays(self._dependent, len(x))), x
        dependent = pays(self._dependent, len(x))
        return norms.add_rms_norm(x, residual, weight, eps, in_place=False, dependent=dependent)

    def _one_after_norm(
        self, tiles: RowTiles, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._one(tiles, Row(x, weight, eps, None, None), gated=gated), x
        stream = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self._one(tiles, Row(x, weight, eps, residual, stream), gated=gated), stream

    def _one(self, tiles: RowTiles, row: Row, *, gated: bool) -> Tensor:
        y = self._output(1, row.x, gated)
        gemv_kernel[(triton.cdiv(y.shape[1], tiles.outputs),)](
            row, Target(self._weight, self._bias, y), N=y.shape[1], K=self._weight.shape[1], BN=tiles.outputs,
            BK=tiles.columns, AHEAD=tiles.ahead, IN_TURN=tiles.in_turn, GATED=gated, num_warps=tiles.warps,
            **launch_words(self._dependent),
        )  # fmt: skip
        return y

    def _few(self, tiles: FewTiles, x: Tensor, *, gated: bool) -> Tensor:
        y = self._output(len(x), x, gated)
        few_rows_kernel[(triton.cdiv(self._weight.shape[0], tiles.rows),)](
            x, x.stride(0), Target(self._weight, self._bias, y), len(x), N=y.shape[1], K=self._weight.shape[1], M=FEW,
            BN=tiles.rows, SPLIT=tiles.warps, BLOCKS=tiles.blocks, AHEAD=tiles.ahead, GATED=gated,
            DOT_F32=is_interpreted(), num_warps=tiles.warps, **launch_words(self._dependent),
        )  # fmt: skip
        return y

    def _split(self, tiles: SplitTiles, x: Tensor, *, gated: bool) -> Tensor:
        y = self._output(len(x), x, gated)
        height = FEW * triton.next_power_of_2(triton.cdiv(len(x), FEW))
        num_tiles = triton.cdiv(self._weight.shape[0], tiles.rows)
        pieces = triton.cdiv(self._weight.shape[1], tiles.columns)
        parts = triton.cdiv(pieces, triton.cdiv(pieces, tiles.parts))  # none is left without a piece
        sums = None
        if parts > 1:
            sums = torch.empty(num_tiles, parts, tiles.rows, height, dtype=torch.float32, device=x.device)
        split_kernel[(num_tiles, parts)](
            x, x.stride(0), Target(self._weight, self._bias, y), sums, self._counters, len(x), N=y.shape[1],
            K=self._weight.shape[1], M=height, BN=tiles.rows, BK=tiles.columns, SPLIT=parts, STAGES=tiles.stages,
            GATED=gated, DOT_F32=is_interpreted(), num_warps=4, **launch_words(self._dependent),
        )  # fmt: skip
        return y

    def _output(self, num_rows: int, x: Tensor, gated: bool) -> Tensor:
        rows = self._weight.shape[0]
        return torch.empty(num_rows, rows // 2 if gated else rows, dtype=x.dtype, device=x.device)


# --------------------------------------------------------------------------------------------------- invariant products


@dataclass(frozen=True)
class MatrixTiles:
    """A tile of `matrix_kernel`, [rows, outputs] by `columns` at a time, its warps, and tiles of columns on the way."""

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int


def choose_matrix_tiles(dtype: torch.dtype, num_rows: int, outputs: int) -> MatrixTiles:
    """Tiles for num_rows rows of x: those of 16 bits differ in speed and never in bits (`tests/backends/triton`)."""
    if dtype == torch.float32:
        return MatrixTiles(64, 64, 32, warps=4, stages=3)
    if num_rows <= 64:
        if outputs >= 16384:
            return MatrixTiles(64, 128, 64, warps=4, stages=4)
        return MatrixTiles(64, 64, 128, warps=4, stages=4)
    return MatrixTiles(128, 256, 64, warps=8, stages=3)


class InvariantLinear:
    """A product whose bits for a row do not depend on the other rows. It composes with norms, and takes none."""

    __slots__ = ("_bias", "_dependent", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, dependent: bool) -> None:
        self._weight, self._bias, self._dependent = weight, bias, dependent

    def __call__(self, x: Tensor) -> Tensor:
        assert x.stride(1) == 1, f"rows must be contiguous, strides are {x.stride()}"
        num_rows, (outputs, columns) = len(x), self._weight.shape
        y = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
        if num_rows == 0:
            return y
        tiles = choose_matrix_tiles(x.dtype, num_rows, outputs)
        matrix_kernel[(triton.cdiv(num_rows, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
            x, x.stride(0), self._weight, self._bias, y, num_rows, outputs, K=columns, BM=tiles.rows, BN=tiles.outputs,
            BK=tiles.columns, GROUP=8, DOT_F32=x.dtype == torch.float32 or is_interpreted(),
            num_warps=tiles.warps, num_stages=tiles.stages, **launch_words(self._dependent),
        )  # fmt: skip
        return y

    def widened(self, x: Tensor) -> Tensor:
        """See `interfaces.Widens`; float32 rows take `matrix_kernel`, whatever their number."""
        if x.dtype == torch.float32 or len(x) == 0:
            return self(x.float())
        return wide_product(x, self._weight, self._bias, WIDE_TILES, dependent=self._dependent)
