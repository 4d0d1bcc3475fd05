"""Mixtures of experts on a CUDA device: which kernels compute how many tokens.

A few tokens run as rows by matrices in three launches, more of them as products grouped by expert in four: route and
sort, gate and up with the activation, down, weighted sum. Shapes follow from the numbers of tokens, choices and experts
alone, and nothing is read back. The kernels are in `triton`, the reference is `framework.layers.experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from framework.errors import ConfigError
from framework.interfaces import Experts, ExpertWeights, Routing
from framework_backends.cuda_device import ProgramMemory
from framework_backends.cuda_linear import RowTiles
from framework_backends.triton.experts_products import Expert, combine_kernel, grouped_kernel
from framework_backends.triton.experts_route import Chosen, Counters, Sorted, route_kernel
from framework_backends.triton.experts_rows import gated_rows_kernel, summed_rows_kernel
from framework_backends.triton.launches import is_interpreted, launch_words, launches_dependent, pays

_ROUTED_VALUES, _MOST_ROWS = 1024, 64
"""Logits of a program that routes, with those of experts that are not there, and most rows of it."""
_SUMMED_COLUMNS = 2048
_BARRIER_BYTES = 64
"""Beside the pieces of a product: what tells that they have arrived."""


@dataclass(frozen=True)
class GroupTiles:
    """How `grouped_kernel` shares out a product: pairs, outputs and columns of a tile, blocks of outputs side by side,
    pieces on the way at a time, warps; whether the weight is the tall operand of the matrix units; whether tiles that
    are half empty are computed as half of one; whether gates and ups are one product of twice as many outputs, whose
    weight is read through a descriptor, where the device has them."""

    pairs: int
    outputs: int
    columns: int
    width: int
    stages: int
    warps: int
    is_tall: bool
    halves: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Rows:
    """Blocks of both products of rows by matrices, for up to `most` tokens."""

    most: int
    up: RowTiles
    down: RowTiles


@dataclass(frozen=True)
class Grouped:
    """Tiles of both products for up to `most` tokens; tiles of one number of pairs."""

    most: int
    up: GroupTiles
    down: GroupTiles


@dataclass(frozen=True)
class ExpertTiles:
    """What is multiplied row by row, and for more tokens what is grouped, of which the last one serves any number; both
    by rising `most`."""

    rows: tuple[Rows, ...]
    grouped: tuple[Grouped, ...]

    @property
    def most_rows(self) -> int:
        """Most tokens that are multiplied row by row."""
        return self.rows[-1].most if self.rows else 0

    def rows_of(self, num_tokens: int) -> Rows:
        """The blocks for up to `most_rows` tokens."""
        return next(one for one in self.rows if num_tokens <= one.most)

    def of(self, num_tokens: int) -> Grouped:
        """The tiles for so many tokens that they are grouped."""
        return next((one for one in self.grouped if num_tokens <= one.most), self.grouped[-1])


ANY = 1 << 62
"""`most` of tiles that serve any number of tokens."""
_ROWS_UP = RowTiles(2, 1024, warps=4, ahead=2)
_ROWS = (
    Rows(1, _ROWS_UP, RowTiles(2, 256, warps=1, ahead=12, in_turn=False)),
    Rows(4, _ROWS_UP, RowTiles(4, 256, warps=1, ahead=6)),
)
_PAIRS_OF_AN_EXPERT = (12, 24, 48)
"""Pairs of an expert on average, up to which tiles have 16, 32 and 64 pairs."""
_SOME = (
    (GroupTiles(16, 64, 128, 8, 3, 4, is_tall=True), GroupTiles(16, 128, 128, 8, 3, 4, is_tall=True)),
    (GroupTiles(32, 64, 64, 8, 3, 4, is_tall=True), GroupTiles(32, 128, 64, 8, 5, 4, is_tall=True)),
    (GroupTiles(64, 64, 64, 8, 3, 4, is_tall=True), GroupTiles(64, 128, 64, 8, 3, 4, is_tall=True)),
)
_MANY = (
    GroupTiles(128, 128, 64, 4, 4, 8, is_tall=False, halves=True, joined=True),
    GroupTiles(128, 256, 64, 8, 4, 8, is_tall=False, halves=True),
)
_WIDE_VALUES = GroupTiles(32, 64, 32, 8, 2, 4, is_tall=False)


def choose_expert_tiles(
    dtype: torch.dtype, num_experts: int, k: int, memory: ProgramMemory, *, batch_invariant: bool
) -> ExpertTiles:
    """Tiles for experts of which each token chooses k, with as many pieces on the way as the memory of a program holds.

    batch_invariant leaves out rows by matrices, which add up in an order of their own. Grouped tiles of 16 bits may be
    of any shape: each adds the columns up in one chain, 16 at a time, from the first to the last (`grouped_kernel`).
    Raises ConfigError for a device whose programs have too little memory.
    """
    if dtype.itemsize != 2:
        return ExpertTiles((), (_fitting(ANY, _WIDE_VALUES, _WIDE_VALUES, dtype, memory),))
    borders = (_border(pairs * num_experts // k) for pairs in _PAIRS_OF_AN_EXPERT)
    chosen = zip((*borders, ANY), (*_SOME, _MANY), strict=True)
    grouped = tuple(_fitting(most, up, down, dtype, memory) for most, (up, down) in chosen)
    return ExpertTiles(() if batch_invariant else _ROWS, grouped)


def tile_bytes(tiles: GroupTiles, dtype: torch.dtype, memory: ProgramMemory, *, gated: bool) -> int:
    """Shared memory that a program of `grouped_kernel` takes at most: of each piece both operands. Sums are in
    registers, and pass through that memory when the pieces have gone."""
    pieces = tiles.stages if memory.keeps_read else tiles.stages - 1
    rows = tiles.pairs + tiles.outputs * (2 if gated else 1)
    return pieces * rows * tiles.columns * dtype.itemsize + _BARRIER_BYTES


def _fitting(most: int, up: GroupTiles, down: GroupTiles, dtype: torch.dtype, memory: ProgramMemory) -> Grouped:
    return Grouped(most, _with_room(up, dtype, memory, gated=True), _with_room(down, dtype, memory, gated=False))


def _with_room(tiles: GroupTiles, dtype: torch.dtype, memory: ProgramMemory, *, gated: bool) -> GroupTiles:
    """The tiles with as many pieces on the way as there is room for, two at least."""
    for stages in range(tiles.stages, 1, -1):
        fewer = replace(tiles, stages=stages)
        needed = tile_bytes(fewer, dtype, memory, gated=gated)
        if needed <= memory.num_bytes:
            return fewer
    raise ConfigError(
        f"backend=cuda: a product of experts takes {needed:,} bytes of shared memory for a program, and the device has "
        f"{memory.num_bytes:,}. Use another device, or say backend=cpu"
    )


def _border(num_tokens: int) -> int:
    """The power of 2 at or below: kernels part where the backend compiles ahead, see `cuda`."""
    return 1 << (num_tokens.bit_length() - 1) if num_tokens else 0


class CudaExpertsPacker:
    """`Backend.pack_experts` of a CUDA device."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self._dependent, self._memory = launches_dependent(), ProgramMemory.current()

    def pack(self, weights: ExpertWeights, routing: Routing) -> Experts:
        """Raises ConfigError as `choose_expert_tiles`."""
        down = weights.down
        tiles = choose_expert_tiles(
            down.dtype, len(down), routing.k, self._memory, batch_invariant=self._batch_invariant
        )
        return CudaExperts(weights, routing, tiles, dependent=self._dependent)


class CudaExperts:
    """`interfaces.Experts` and `AddsBeside` in Triton. Waits for nothing, can be captured. Padding comes out as 0."""

    __slots__ = ("_counters", "_dependent", "_descriptors", "_route", "_routing", "_tiles", "_weights", "counts")

    def __init__(self, weights: ExpertWeights, routing: Routing, tiles: ExpertTiles, *, dependent: bool) -> None:
        _, size, width = weights.down.shape
        if size % 8 or width % 8:  # rows by matrices read pairs of numbers, of rows that begin at whole vectors
            tiles = replace(tiles, rows=())
        self._weights, self._routing, self._tiles, self._dependent = contiguous(weights), routing, tiles, dependent
        num_experts, device = len(weights.down), weights.down.device
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        own = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        self._counters = Counters(self.counts, own)
        self._route = route_words(routing, num_experts)
        self._descriptors: dict[GroupTiles, TensorDescriptor] = {}

    def __call__(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """As `interfaces.Experts`."""
        return self._summed(x, logits, num_tokens, None)

    def beside(self, other: Tensor, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """As `interfaces.AddsBeside`."""
        assert other.shape == x.shape and other.is_contiguous(), f"{other.shape} {other.stride()} beside {x.shape}"
        return self._summed(x, logits, num_tokens, other)

    def _summed(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None, other: Tensor | None) -> Tensor:
        assert x.stride(1) == logits.stride(1) == 1, f"rows must be contiguous: {x.stride()}, {logits.stride()}"
        assert logits.dtype == torch.float32 and logits.shape == (len(x), len(self.counts)), logits.shape
        if len(x) == 0:
            return torch.empty_like(x)
        if len(x) <= self._tiles.most_rows:
            return self._rows(x, logits, num_tokens, other)
        return self._grouped(x, logits, num_tokens, other)

    # ------------------------------------------------------------------------------------------------ few tokens

    def _rows(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None, other: Tensor | None) -> Tensor:
        weights, k, words = self._weights, self._routing.k, self._words(x)
        tiles = self._tiles.rows_of(len(x))
        up, down = tiles.up, tiles.down
        ids = torch.empty(len(x), k, dtype=torch.int32, device=x.device)
        chosen = Chosen(ids, torch.empty(len(x), k, dtype=torch.float32, device=x.device))
        self._choose(logits, chosen, None, num_tokens, rows=1, warps=1, pairs=1, words=words)
        width, size = weights.down.shape[2], x.shape[1]
        inner = torch.empty(len(x) * k, width, dtype=x.dtype, device=x.device)
        gated_rows_kernel[(triton.cdiv(width, up.outputs), len(inner))](
            x, x.stride(0), Expert(weights.gate_up, weights.gate_up_bias), ids, inner, num_tokens, len(x), self._limit,
            N=width, K=size, CHOICES=k, BN=up.outputs, BK=up.columns, AHEAD=up.ahead, IN_TURN=up.in_turn,
            num_warps=up.warps, **words,
        )  # fmt: skip
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        summed_rows_kernel[(triton.cdiv(size, down.outputs), len(x))](
            inner, Expert(weights.down, weights.down_bias), ids, chosen.weights, other, out, num_tokens, len(x),
            N=size, K=width, CHOICES=k, BN=down.outputs, BK=down.columns, AHEAD=down.ahead,
            IN_TURN=down.in_turn, num_warps=down.warps, **words,
        )  # fmt: skip
        return out

    # ------------------------------------------------------------------------------------------------ more tokens

    def _grouped(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None, other: Tensor | None) -> Tensor:
        tiles, words = self._tiles.of(len(x)), self._words(x)
        weights, by_expert = self._sorted(logits, num_tokens, tiles.up.pairs, words)
        inner = self._product(x, by_expert, tiles.up, len(x), gated=True, words=words)
        outputs = self._product(inner, by_expert, tiles.down, len(x), gated=False, words=words)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = min(_SUMMED_COLUMNS, triton.next_power_of_2(x.shape[1]))
        combine_kernel[(len(x), triton.cdiv(x.shape[1], block))](
            outputs, weights, other, out, num_tokens, len(x), H=x.shape[1], CHOICES=self._routing.k, BLOCK=block,
            num_warps=max(1, block // 512), **words,
        )  # fmt: skip
        return out

    def _sorted(
        self, logits: Tensor, num_tokens: Tensor | None, pairs: int, words: dict[str, bool]
    ) -> tuple[Tensor, Sorted]:
        """(weights [T, k], pairs by expert in tiles of so many)."""
        count, num_experts, k, device = len(logits), len(self.counts), self._routing.k, logits.device
        weights = torch.empty(count, k, dtype=torch.float32, device=device)
        by_expert = Sorted(
            torch.empty(num_experts, count, dtype=torch.int32, device=device),
            torch.empty(most_tiles(count, k, num_experts, pairs), 4, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )
        rows = min(_MOST_ROWS, max(1, _ROUTED_VALUES // triton.next_power_of_2(num_experts)))
        self._choose(logits, Chosen(None, weights), by_expert, num_tokens, rows=rows, warps=4, pairs=pairs, words=words)
        return weights, by_expert

    def _product(
        self, x: Tensor, by_expert: Sorted, tiles: GroupTiles, count: int, *, gated: bool, words: dict[str, bool]
    ) -> Tensor:
        size, width, k = self._weights.down.shape[1], self._weights.down.shape[2], self._routing.k
        columns, outputs = (size, width) if gated else (width, size)
        blocks = triton.cdiv(outputs, tiles.outputs)
        y = torch.empty(count * k, outputs, dtype=x.dtype, device=x.device)
        most = len(by_expert.tiles)
        grouped_kernel[(most * blocks,)](
            x, x.stride(0), *self._source(tiles, gated), by_expert, most, y, count, self._limit if gated else None,
            N=outputs, K=columns, CHOICES=k, BM=tiles.pairs, BN=tiles.outputs, BK=tiles.columns, WIDTH=tiles.width,
            STAGES=tiles.stages, TALL=tiles.is_tall, GATED=gated, JOINED=gated and self._joins(tiles),
            HALVES=tiles.halves, num_warps=tiles.warps, DOT_F32=x.dtype == torch.float32 or is_interpreted(), **words,
        )  # fmt: skip
        return y

    def _source(self, tiles: GroupTiles, gated: bool) -> tuple[Any, Tensor | None]:
        """(weight as the kernel reads it, bias); descriptors are made once."""
        weights = self._weights
        if not gated:
            return weights.down, weights.down_bias
        if not self._joins(tiles):
            return weights.gate_up, weights.gate_up_bias
        if tiles not in self._descriptors:
            self._descriptors[tiles] = gates_with_ups(weights.gate_up, tiles)
        return self._descriptors[tiles], weights.gate_up_bias

    def _joins(self, tiles: GroupTiles) -> bool:
        """Devices that have dependent launches have descriptors as well, of rows that are multiples of 16 bytes."""
        has_descriptors, gate_up = self._dependent or is_interpreted(), self._weights.gate_up
        return tiles.joined and has_descriptors and gate_up.stride(1) * gate_up.itemsize % 16 == 0

    # ------------------------------------------------------------------------------------------------------- both

    def _choose(
        self, logits: Tensor, chosen: Chosen, by_expert: Sorted | None, num_tokens: Tensor | None,
        *, rows: int, warps: int, pairs: int, words: dict[str, bool],
    ) -> None:  # fmt: skip
        route_kernel[(triton.cdiv(len(logits), rows),)](
            logits, logits.stride(0), self._routing.bias, self._routing.scale, chosen, by_expert, self._counters,
            num_tokens, len(logits), ROWS=rows, BM=pairs, num_warps=warps, **self._route, **words,
        )  # fmt: skip

    @property
    def _limit(self) -> float | None:
        return self._weights.limit if self._weights.activation == "clamped" else None

    def _words(self, x: Tensor) -> dict[str, bool]:
        return launch_words(pays(self._dependent, len(x)))


def most_tiles(num_tokens: int, k: int, num_experts: int, pairs: int) -> int:
    """Tiles of up to so many pairs of one expert, whichever the tokens choose: whole ones, and one that is not whole of
    each expert that is chosen."""
    return num_tokens * k // pairs + min(num_tokens * k, num_experts)


def contiguous(weights: ExpertWeights) -> ExpertWeights:
    """The same weights as kernels read them."""
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    tensors = {name: getattr(weights, name) for name in names}
    return replace(weights, **{name: one.contiguous() for name, one in tensors.items() if one is not None})


def gates_with_ups(gate_up: Tensor, tiles: GroupTiles) -> TensorDescriptor:
    """gate_up as matrices, the gates' and the ups' of each expert in turn, in blocks of both, of a tile's outputs and
    columns."""
    num_experts, height, columns = gate_up.shape
    matrices = gate_up.view(2 * num_experts, height // 2, columns)
    block = [2, tiles.outputs, tiles.columns]
    return TensorDescriptor(matrices, list(matrices.shape), list(matrices.stride()), block)


def route_words(routing: Routing, num_experts: int) -> dict[str, int | bool | str]:
    """Constants of `route_kernel`."""
    return {
        "E": num_experts, "E2": triton.next_power_of_2(num_experts),
        "K": routing.k, "K2": triton.next_power_of_2(routing.k),
        "SCORES": routing.scores, "NORMALIZES": routing.normalizes,
        "GROUPS": routing.num_groups, "CHOSEN_GROUPS": routing.num_chosen_groups,
        "TOP2": routing.group_score == "top2", "G2": triton.next_power_of_2(routing.num_groups),
    }  # fmt: skip
