"""`interfaces.SamplerOps` in Triton: what stages name as fused operations runs in a few launches over the logits.

Works on any device that Triton does, and on the CPU in its interpreter. A backend makes one and gives it away as its
`sampler_ops`; kernels are in the modules beside this one, each named with its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from framework.batch import Rows
from framework.interfaces import FusedChain, FusedChoice, FusedLogprobs
from framework_backends.triton import features as f
from framework_backends.triton.apply import apply_kernel
from framework_backends.triton.candidates import Search
from framework_backends.triton.groups import Chosen, Groups, Interval, choose_kernel, group_kernel
from framework_backends.triton.logprobs import Told, logprobs_kernel
from framework_backends.triton.settle import settle_kernel
from framework_backends.triton.thresholds import Limits

IN_PLACE = ("bitmask", "allowed", "ban_until", "bias", "penalties", "scale")
THRESHOLDS = ("min_p", "top_k", "top_p")
SELECT = ("argmax", "draw")

LIST_CAPACITY = 16384
"""Candidates of a row that are listed: 64 kB a row. Rows with more are counted over first, see `settle`."""
BLOCK_GROUPS = 32
"""Groups of 128 ids to a program: 32 logits a thread, four loads of 16 bytes in bfloat16."""
NUM_WARPS = 4
ROW_GROUPS, ROW_WARPS, ROW_REGISTERS = 16, 8, 128
"""Of `settle_kernel`, where one program has a row to itself: groups it works on at a time, warps, and the registers of
a thread with which two programs fit side by side. What does not fit is kept aside outside of its loops."""
MANY_ROWS, LOOPS = 32, 2
"""The end of a program, where it waits for its stores and counts itself, is as long as the work on one block: batches
that fill the device many times over draw in a launch of their own, or pay it once for LOOPS blocks of logprobs. Small
ones need the programs, and a launch would cost them more."""


class TritonSamplerOps:
    """Fused sampling. Scratch memory is taken for the largest batch so far and stays where it is, also behind larger
    ones: at most twice what the largest needs.

    block_groups, num_warps  groups of a block, and the warps that work on it
    row_groups, row_warps    those of a program that has a row to itself
    loops                    blocks to a program of logprobs, of MANY_ROWS or more rows; one block below
    goes_on                  whether the program of a row that ends last draws its token, or a second launch does; None:
                             the launch for MANY_ROWS or more
    capacity                 of the list of candidates
    None of them changes a result: what is summed in float32 is a group of 128 ids, and a group's sum is made alike by
    as many threads as there are. Only sums that bounds are searched with depend on those of a row, for all batches
    alike.
    """

    fuses: tuple[str, ...] = (*IN_PLACE, *THRESHOLDS, *SELECT)
    compiles = True

    def __init__(
        self,
        block_groups: int = BLOCK_GROUPS,
        num_warps: int = NUM_WARPS,
        row_groups: int = ROW_GROUPS,
        row_warps: int = ROW_WARPS,
        loops: int = LOOPS,
        goes_on: bool | None = None,
        capacity: int = LIST_CAPACITY,
    ) -> None:
        self._split, self._num_warps, self._loops = block_groups, num_warps, loops
        self._row_groups, self._row_warps = row_groups, row_warps
        self._goes_on, self._capacity = goes_on, capacity
        self._scratch: dict[tuple[torch.device, int], _Scratch] = {}
        self._outgrown: list[_Scratch] = []  # captured steps may write there still

    # ------------------------------------------------------------------------------------------- the contract

    def sample(
        self, logits: Tensor, rows: Rows, chain: FusedChain, interval: tuple[Tensor, Tensor] | None
    ) -> FusedChoice:
        """See `interfaces.SamplerOps.sample`."""
        operands = dict(chain)
        draws = _column(operands["draw"]["draws"]) if "draw" in operands else None
        limits = _limits(operands) if draws is not None else None
        choice = _empty_choice(len(logits), logits.device)
        chosen = Chosen(choice.ids, choice.told, choice.top, choice.value, choice.log_sum)
        work = self._work(logits, rows, chain, interval, draws, chosen)
        if limits is not None:
            work.measure()
            work.settle(limits, self._search(work.scratch))
        elif self._goes_on if self._goes_on is not None else len(logits) < MANY_ROWS:
            work.measure(goes_on=True)
        else:
            work.measure()
            work.choose()
        return choice

    def bounds(self, logits: Tensor, rows: Rows, chain: FusedChain, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """See `interfaces.SamplerOps.bounds`."""
        limits = _limits(dict(chain))
        assert limits is not None, chain
        work = self._work(logits, rows, (), (lo, hi), None, None)
        search = self._search(work.scratch)._replace(lo=torch.empty_like(lo))
        work.measure()
        work.settle(limits, search)
        return search.lo, hi

    def apply(self, logits: Tensor, rows: Rows, chain: FusedChain) -> Tensor:
        """See `interfaces.SamplerOps.apply`."""
        work = self._work(logits, rows, chain, None, None, None)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        apply_kernel[work.grid](
            work.logits, work.rows, work.features, out, GROUPS=self._split, num_warps=self._num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def logprobs(self, logits: Tensor, ids: Tensor, k: int, *, is_log: bool) -> FusedLogprobs:
        """See `interfaces.SamplerOps.logprobs`."""
        count = len(ids)
        scratch = self._scratch_for(count, logits)
        told = _empty_logprobs(count, k, logits.device)
        top = (told.top_ids, told.top_logprobs, told.top_ranks) if k else (None, None, None)
        loops = self._loops if count >= MANY_ROWS else 1
        logprobs_kernel[(triton.cdiv(scratch.num_blocks, loops), count)](
            f.Logits(logits, logits.stride(0), logits.shape[1]), ids, scratch.groups, scratch.larger,
            Told(told.sampled, told.rank, *top), scratch.counters, k, IS_LOG=is_log, GROUPS=self._split,
            MAX_GROUPS=scratch.max_groups, MAX_BLOCKS=scratch.max_blocks, LOOPS=loops, num_warps=self._num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return told

    # -------------------------------------------------------------------------------------------------- memory

    def _work(
        self,
        logits: Tensor,
        rows: Rows,
        chain: FusedChain,
        interval: tuple[Tensor, Tensor] | None,
        draws: f.Column | None,
        chosen: Chosen | None,
    ) -> _Work:
        return _Work(
            scratch=self._scratch_for(len(logits), logits),
            logits=f.Logits(logits, logits.stride(0), logits.shape[1]),
            rows=f.Rows(rows.req_idx, rows.position, rows.seed),
            features=_features(chain, rows, len(logits)),
            interval=None if interval is None else Interval(*interval),
            draws=draws,
            chosen=chosen,
            num_rows=len(logits),
            split=self._split,
            num_warps=self._num_warps,
            row_groups=self._row_groups,
            row_warps=self._row_warps,
        )

    def _search(self, scratch: _Scratch) -> Search:
        """Memory that only thresholds need; its lo is nobody's."""
        if scratch.search is None:
            wanted = torch.empty_like(scratch.groups.best, dtype=torch.int32)
            listed = wanted.new_empty(scratch.num_rows, self._capacity, dtype=torch.float32)
            scratch.search = Search(wanted, listed, self._capacity, None)
        return scratch.search

    def _scratch_for(self, num_rows: int, logits: Tensor) -> _Scratch:
        assert logits.stride(1) == 1, "logits must be contiguous along the vocabulary"
        key = logits.device, logits.shape[1]
        scratch = self._scratch.get(key)
        if scratch is not None and scratch.num_rows >= num_rows:
            return scratch
        # For the power of 2: batches that grow by a row at a time would leave one of each size behind.
        made = _Scratch.of(triton.next_power_of_2(num_rows), logits, self._split)
        if not is_recorded(logits.device):  # a recording may never run, and nothing makes its counters 0 then
            if scratch is not None:
                self._outgrown.append(scratch)
            self._scratch[key] = made
        return made


def is_recorded(device: torch.device) -> bool:
    """Whether what is launched now is recorded, and not executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass
class _Scratch:
    """Memory of kernels between their launches, for up to num_rows rows. counters stay 0 between launches."""

    num_rows: int
    num_blocks: int
    max_blocks: int
    max_groups: int
    groups: Groups
    counters: Tensor
    larger: Tensor
    search: Search | None = None

    @classmethod
    def of(cls, num_rows: int, logits: Tensor, split: int) -> _Scratch:
        num_groups = max(2, triton.cdiv(logits.shape[1], f.GROUP))  # see `features.Column`
        num_blocks = triton.cdiv(num_groups, split)
        best = torch.empty(num_rows, num_groups, device=logits.device)
        counters = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        larger = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
        groups = Groups(best, torch.empty_like(best), num_groups)
        up = triton.next_power_of_2
        return cls(num_rows, num_blocks, up(num_blocks), up(num_groups), groups, counters, larger)


@dataclass(frozen=True)
class _Work:
    """A step: what its launches are given, and the launches, without fused multiply-add (see `features`)."""

    scratch: _Scratch
    logits: f.Logits
    rows: f.Rows
    features: f.Features
    interval: Interval | None
    draws: f.Column | None
    chosen: Chosen | None
    num_rows: int
    split: int
    num_warps: int
    row_groups: int
    row_warps: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of a row are neighbours, so that rows come to their ends one after the other."""
        return self.scratch.num_blocks, self.num_rows

    def measure(self, *, goes_on: bool = False) -> None:
        """Best and mass of each group; the rows' tokens as well with goes_on."""
        group_kernel[self.grid](
            *self._shared, self.scratch.counters, GROUPS=self.split, MAX_GROUPS=self.scratch.max_groups,
            GOES_ON=goes_on, num_warps=self.num_warps, enable_fp_fusion=False,
        )  # fmt: skip

    def choose(self) -> None:
        """Tokens out of groups."""
        choose_kernel[(self.num_rows,)](
            *self._shared, MAX_GROUPS=self.scratch.max_groups, num_warps=self.row_warps, enable_fp_fusion=False
        )

    def settle(self, limits: Limits, search: Search) -> None:
        """Tokens, or bounds, out of groups and limits."""
        settle_kernel[(self.num_rows,)](
            *self._shared, limits, search, GROUPS=self.row_groups, MAX_GROUPS=self.scratch.max_groups,
            num_warps=self.row_warps, maxnreg=ROW_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip

    @property
    def _shared(self) -> tuple[Any, ...]:
        groups = self.scratch.groups
        return self.logits, self.rows, self.features, self.interval, groups, self.draws, self.chosen


# ---------------------------------------------------------------------------- operands of stages, as kernels take them


def _column(tensor: Tensor) -> f.Column:
    return f.Column(tensor, tensor.stride(0) - 1)


def _pool(rows: Tensor, place: Tensor) -> f.Pool:
    return f.Pool(rows, rows.stride(0), _column(place))


def _bytes(words: Tensor) -> Tensor:
    """[n, W] int32 -> [n, 4 W] uint8, id i in bit i mod 8 of byte i // 8."""
    return words.view(torch.uint8)


def _limits(operands: Mapping[str, Mapping[str, Any]]) -> Limits | None:
    if not any(name in operands for name in THRESHOLDS):
        return None
    words = {"min_p": "log_min_p", "top_k": "k", "top_p": "top_p"}
    return Limits(*(_column(operands[n][words[n]]) if n in operands else None for n in THRESHOLDS))


def _features(chain: FusedChain, rows: Rows, num_rows: int) -> f.Features:
    made: dict[str, Any] = {}
    for name, operands in chain:
        if name in _FEATURES:
            field, make = _FEATURES[name]
            made[field] = make(num_rows, **operands)
    return f.Features(**made)


def _grammar(num_rows: int, words: Tensor, logits_rows: Tensor | None) -> f.Grammar:
    place = torch.arange(num_rows, dtype=torch.int32, device=words.device)
    if logits_rows is not None:
        place = torch.full_like(place, -1).index_copy_(0, logits_rows, place[: len(logits_rows)])
    packed = _bytes(words)
    return f.Grammar(packed, packed.stride(0), place)


def _allowed(num_rows: int, words: Tensor, place: Tensor) -> f.Pool:
    return _pool(_bytes(words), place)


def _bans(num_rows: int, until: Tensor, ids: Tensor) -> f.Bans:
    return f.Bans(_column(until), ids, ids.stride(0), ids.shape[1])


def _bias(num_rows: int, count: Tensor, ids: Tensor, ids_place: Tensor, values: Tensor, values_place: Tensor) -> f.Bias:
    return f.Bias(_column(count), _pool(ids, ids_place), _pool(values, values_place))


def _penalties(
    num_rows: int, repetition: Tensor, frequency: Tensor, presence: Tensor, seen: Tensor, place: Tensor
) -> f.Penalties:
    return f.Penalties(_column(repetition), _column(frequency), _column(presence), _pool(seen, place))


def _scale(num_rows: int, factor: Tensor) -> f.Column:
    return _column(factor)


_FEATURES: dict[str, tuple[str, Callable[..., Any]]] = {
    "bitmask": ("grammar", _grammar),
    "allowed": ("allowed", _allowed),
    "ban_until": ("bans", _bans),
    "bias": ("bias", _bias),
    "penalties": ("penalties", _penalties),
    "scale": ("inverse", _scale),
}


def _empty_choice(count: int, device: torch.device) -> FusedChoice:
    ids, floats = ((count,), torch.int64), ((count,), torch.float32)
    return FusedChoice(*_in_one_piece(device, ids, ids, floats, floats, floats))


def _empty_logprobs(count: int, k: int, device: torch.device) -> FusedLogprobs:
    top_ids, sampled, rank, top, top_ranks = _in_one_piece(
        device, ((count, k), torch.int64), ((count,), torch.float32), ((count,), torch.int32),
        ((count, k), torch.float32), ((count, k), torch.int32),
    )  # fmt: skip
    return FusedLogprobs(sampled, rank, top_ids, top, top_ranks)


def _in_one_piece(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Empty tensors of these shapes and dtypes, which one copy takes to the host.

    They begin at multiples of 16 bytes, as memory of their own would: a kernel is compiled anew for others.
    """
    sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in wanted]
    room = torch.empty(sum(-(-size // 16) * 16 for size in sizes), dtype=torch.uint8, device=device)
    starts = accumulate((-(-size // 16) * 16 for size in sizes), initial=0)
    pieces = [room[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return [piece.view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, wanted, strict=True)]
