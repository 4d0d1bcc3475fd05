"""`interfaces.SamplerOps` in Triton: what stages name as fused operations runs in a few launches over the logits.

Works on any device that Triton does, and on the CPU in its interpreter. A backend makes one and gives it away as its
`sampler_ops`; kernels are in the modules beside this one, each named with its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from framework.batch import Rows
from framework.interfaces import FusedChain, FusedChoice, FusedLogprobs
from framework_backends.triton import features as f
from framework_backends.triton.apply import apply_kernel
from framework_backends.triton.groups import Chosen, Groups, Interval, choose_kernel, group_kernel, regroup_kernel
from framework_backends.triton.logprobs import Told, logprobs_kernel
from framework_backends.triton.thresholds import (
    NUM_PROBES,
    Limits,
    Search,
    bracket_kernel,
    probe_kernel,
    settle_kernel,
)

IN_PLACE = ("bitmask", "allowed", "ban_until", "bias", "penalties", "scale")
THRESHOLDS = ("min_p", "top_k", "top_p")
SELECT = ("argmax", "draw")

LIST_CAPACITY = 16384
"""Candidates of a row that thresholds gather: 64 kB a row. Rows with more are walked over, see `thresholds`."""
BLOCK_GROUPS = 32
"""Groups of 128 ids to a program: 32 logits a thread, four loads of 16 bytes in bfloat16."""
NUM_WARPS = 4
MANY_ROWS, LOOPS = 32, 2
"""The end of a program, where it waits for its stores and counts itself, is as long as the work on one block: batches
that fill the device many times over pay it once for LOOPS blocks. Small ones need the programs."""


class TritonSamplerOps:
    """Fused sampling. Scratch memory is taken for the largest batch so far and stays at its address.

    block_groups, num_warps  groups of a block, and the warps that work on it
    loops                    blocks to a program of a batch with MANY_ROWS or more; one block below
    goes_on                  whether the program of a row that ends last draws its token, or a second launch does
    capacity                 of the list of candidates
    None of them changes a result: what is summed in float32 is a group of 128 ids, or a row of groups, and a group's
    sum is made alike by as many threads as there are.
    """

    fuses = (*IN_PLACE, *THRESHOLDS, *SELECT)

    def __init__(
        self,
        block_groups: int = BLOCK_GROUPS,
        num_warps: int = NUM_WARPS,
        loops: int = LOOPS,
        goes_on: bool = True,
        capacity: int = LIST_CAPACITY,
    ) -> None:
        self._split, self._num_warps, self._loops = block_groups, num_warps, loops
        self._goes_on, self._capacity = goes_on, capacity
        self._scratch: dict[tuple[torch.device, int], _Scratch] = {}

    # ------------------------------------------------------------------------------------------- the contract

    def sample(
        self, logits: Tensor, rows: Rows, chain: FusedChain, interval: tuple[Tensor, Tensor] | None
    ) -> FusedChoice:
        """See `interfaces.SamplerOps.sample`."""
        work = self._work(logits, rows, chain)
        operands = dict(chain)
        draws = _column(operands["draw"]["draws"]) if "draw" in operands else None
        limits = _limits(operands)
        own = None if interval is None else Interval(*interval)
        choice = _empty_choice(len(logits), logits.device)
        chosen = Chosen(choice.ids, choice.told, choice.top, choice.value, choice.log_sum)
        if limits is None or draws is None:
            args = own, work.groups, draws, chosen, work.counters
            work.launch_loops(group_kernel, *args, GOES_ON=self._goes_on)
            if not self._goes_on:
                work.launch_rows(choose_kernel, *args)
            return choice
        lo = self._search(work, limits, own, draws)
        narrowed = Interval(lo, torch.full_like(lo, float("inf")) if own is None else own.hi)
        work.launch(regroup_kernel, narrowed, work.groups, draws, chosen, work.counters)
        return choice

    def bounds(self, logits: Tensor, rows: Rows, chain: FusedChain, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """See `interfaces.SamplerOps.bounds`."""
        limits = _limits(dict(chain))
        assert limits is not None, chain
        return self._search(self._work(logits, rows, ()), limits, Interval(lo, hi), None).clone(), hi

    def apply(self, logits: Tensor, rows: Rows, chain: FusedChain) -> Tensor:
        """See `interfaces.SamplerOps.apply`."""
        work = self._work(logits, rows, chain)
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
        loops = self._loops_of(count)
        logprobs_kernel[(triton.cdiv(scratch.num_blocks, loops), count)](
            f.Logits(logits, logits.stride(0), logits.shape[1]), ids, scratch.groups, scratch.larger,
            Told(told.sampled, told.rank, *top), scratch.counters, k, IS_LOG=is_log, GROUPS=self._split,
            MAX_GROUPS=scratch.max_groups, MAX_BLOCKS=scratch.max_blocks, LOOPS=loops, num_warps=self._num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return told

    # ------------------------------------------------------------------------------------------------- launches

    def _search(self, work: _Work, limits: Limits, interval: Interval | None, draws: f.Column | None) -> Tensor:
        """[L] lower bounds, in scratch memory."""
        scratch, groups = work.scratch, work.groups
        if scratch.search is None:
            scratch.search = _search_memory(scratch, self._capacity)
        search = scratch.search
        work.launch_loops(bracket_kernel, limits, interval, groups, draws, search, work.counters)
        if limits.top_k is not None or limits.top_p is not None:
            work.launch(probe_kernel, interval, groups, search)
            work.launch(settle_kernel, limits, interval, groups, search, work.counters, MAX_BLOCKS=scratch.max_blocks)
        lo: Tensor = search.lo[: work.grid[1]]
        return lo

    def _work(self, logits: Tensor, rows: Rows, chain: FusedChain) -> _Work:
        scratch = self._scratch_for(len(logits), logits)
        own = f.Rows(rows.req_idx, rows.position, rows.seed)
        loops = self._loops_of(len(logits))
        line = f.Logits(logits, logits.stride(0), logits.shape[1])
        return _Work(
            scratch, line, own, _features(chain, rows, len(logits)), len(logits), self._split, self._num_warps, loops
        )

    def _loops_of(self, num_rows: int) -> int:
        return self._loops if num_rows >= MANY_ROWS else 1

    def _scratch_for(self, num_rows: int, logits: Tensor) -> _Scratch:
        assert logits.stride(1) == 1, "logits must be contiguous along the vocabulary"
        key = logits.device, logits.shape[1]
        scratch = self._scratch.get(key)
        if scratch is None or scratch.num_rows < num_rows:
            scratch = self._scratch[key] = _Scratch.of(num_rows, logits, self._split)
        return scratch


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


def _search_memory(scratch: _Scratch, capacity: int) -> Search:
    counters, num_rows = scratch.counters, scratch.num_rows
    floats = counters.new_empty(3, num_rows, dtype=torch.float32)
    counts = counters.new_empty(num_rows, scratch.num_blocks, NUM_PROBES)
    return Search(
        cut=floats[0],
        total=floats[1],
        fits=torch.empty_like(counters),
        lo=floats[2],
        counts=counts,
        masses=counts.new_empty(counts.shape, dtype=torch.float32),
        list=counts.new_empty(num_rows, capacity, dtype=torch.float32),
        capacity=capacity,
    )


@dataclass(frozen=True)
class _Work:
    """What all launches of a step are given."""

    scratch: _Scratch
    logits: f.Logits
    rows: f.Rows
    features: f.Features
    num_rows: int
    split: int
    num_warps: int
    loops: int

    @property
    def groups(self) -> Groups:
        return self.scratch.groups

    @property
    def counters(self) -> Tensor:
        return self.scratch.counters

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of a row are neighbours, so that rows come to their ends one after the other."""
        return self.scratch.num_blocks, self.num_rows

    def launch_loops(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """A kernel whose programs read several blocks."""
        grid = triton.cdiv(self.scratch.num_blocks, self.loops), self.num_rows
        self._launch(kernel, grid, *args, LOOPS=self.loops, **constants)

    def launch_rows(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """A kernel with one program to a row."""
        self._launch(kernel, (1, self.num_rows), *args, **constants)

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        self._launch(kernel, self.grid, *args, **constants)

    def _launch(self, kernel: Any, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
        """Without fused multiply-add: see `features`."""
        kernel[grid](
            self.logits, self.rows, self.features, *args, GROUPS=self.split, MAX_GROUPS=self.scratch.max_groups,
            num_warps=self.num_warps, enable_fp_fusion=False, **constants,
        )  # fmt: skip


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
    ids = torch.empty(2, count, dtype=torch.int64, device=device)
    floats = torch.empty(3, count, device=device)
    return FusedChoice(ids[0], ids[1], floats[0], floats[1], floats[2])


def _empty_logprobs(count: int, k: int, device: torch.device) -> FusedLogprobs:
    return FusedLogprobs(
        sampled=torch.empty(count, device=device),
        rank=torch.empty(count, dtype=torch.int32, device=device),
        top_ids=torch.empty(count, k, dtype=torch.int64, device=device),
        top_logprobs=torch.empty(count, k, device=device),
        top_ranks=torch.empty(count, k, dtype=torch.int32, device=device),
    )
