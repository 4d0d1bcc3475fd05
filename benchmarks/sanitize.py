"""One smallest launch of every Triton kernel of ours, for compute-sanitizer: bad addresses and races, not speed.

    python benchmarks/sanitize.py                       # launches, compared with torch
    python benchmarks/sanitize.py --tool all            # the same under memcheck, then under racecheck
    python benchmarks/sanitize.py --only attention      # one group of launches

Launches go through what the engine calls, without an engine: under a sanitizer every instruction is slow, and each case
serves for a kernel's own tile, with edges. Results are compared loosely, so that nothing passes by not running. A
kernel that was never launched is named, and the exit code is 1; it is 2 where nothing can run here, and 9 where the
sanitizer found something.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from framework import step_ops
from framework.batch import Rows
from framework.interfaces import AttentionContext, ExpertWeights, HeadNorms, Rotation, Routing
from framework.layers import ops as layer_reference
from framework.layers.experts import ReferenceExperts
from framework.step_ops import StepBuffers, TableViews
from framework.testing.attention import AttentionCase, LatentSizes, build
from framework.testing.attention import reference as attention_reference
from framework.testing.attention_engine import AttentionEngine, compute_past, turnings
from framework.testing.attention_suite import AttentionPlugin

PACKAGES = ("framework_backends.triton", "framework_attention.triton")
TOOLS = ("memcheck", "racecheck")
FOUND, NOTHING_RUN = 9, 2
DTYPE, NEAR = torch.bfloat16, 6e-2
"""Weights, activations and the result are rounded to 8 bits; the interpreter cuts bits off where devices round."""


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """On the host, so that a device runs little beside our kernels."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(actual: Tensor, expected: Tensor, tolerance: float = NEAR) -> None:
    """Fails unless both are alike; infinities must be equal, and nothing may be NaN."""
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance)


def equal(actual: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(actual.cpu(), expected.cpu()), f"{what} differs from the reference"


# ------------------------------------------------------------------------------------------------------ steps, outbox

TABLE_ROWS, MAX_LEN, MAX_TOKENS = 9, 160, 200
SIZES = (4, 16)
"""Tokens of a block, by KV group."""
CHUNKS = [(1, 7, True), (130, 0, False), (20, 20, True), (3, 0, True), (1, 39, True)]
DECODES = [(1, 7, True), (1, 0, True), (1, 39, True), (1, 15, True), (0, 0, False), (0, 0, False)]
"""(scheduled, computed, draws) of each row; (0, 0, False) is padding."""


def step_memory(step: Sequence[tuple[int, int, bool]], device: torch.device) -> tuple[StepBuffers, TableViews]:
    """A request table of random content, with strided columns, and the buffers of one step: the same on any device."""
    rng = np.random.default_rng(1)
    scheduled, computed, draws = (np.array(values) for values in zip(*step, strict=True))
    rows = np.where(scheduled > 0, rng.permutation(np.arange(1, TABLE_ROWS))[: len(step)], 0)
    all_computed = rng.integers(0, MAX_LEN, TABLE_ROWS)
    all_computed[rows] = computed
    all_computed[0] = 0

    def column(values: Any, dtype: torch.dtype) -> Any:
        packed = torch.zeros(TABLE_ROWS, 3, dtype=dtype)
        packed[:, 1] = torch.from_numpy(values)
        return SimpleNamespace(dev=packed.to(device)[:, 1])

    def ints(values: Any = (), length: int = TABLE_ROWS, dtype: torch.dtype = torch.int64) -> Tensor:
        full = torch.full((length,), -7, dtype=dtype)
        full[: len(values)] = torch.as_tensor(np.asarray(values, np.int64))
        return full.to(device)

    tables = [torch.from_numpy(rng.integers(1, 999, (TABLE_ROWS, MAX_LEN // size), np.int32)) for size in SIZES]
    new_blocks = torch.zeros(len(SIZES), TABLE_ROWS, dtype=torch.int64)
    new_blocks[0, 0] = 501
    lanes = torch.full((3 + len(SIZES), MAX_TOKENS), -7).to(device)
    table = TableViews(
        token_ids=torch.from_numpy(rng.integers(0, 2**31, (TABLE_ROWS, MAX_LEN), np.int32)).to(device),
        num_tokens=column(rng.integers(0, MAX_LEN, TABLE_ROWS), torch.int32),
        num_computed_tokens=column(all_computed, torch.int32),
        seed=column(rng.integers(-(2**63), 2**63, TABLE_ROWS), torch.int64),
        block_table=tuple(one.to(device) for one in tables),
    )
    buffers = StepBuffers(
        rows=ints(rows),
        new_blocks=new_blocks.to(device),
        num_scheduled=ints(scheduled),
        query_start_loc=ints([0, *np.cumsum(scheduled)], TABLE_ROWS + 1),
        logits_rows=ints(np.flatnonzero(draws)),
        input_ids=ints(length=MAX_TOKENS, dtype=torch.int32),
        positions=lanes[0],
        seq_lens=lanes[1, :TABLE_ROWS],
        draw_positions=lanes[2, :TABLE_ROWS],
        slot_mapping=tuple(lanes[3:]),
        lanes=lanes,
        logits_indices=ints(),
        expanded_idx_mapping=ints(),
        seeds=ints(),
        arange=torch.arange(MAX_TOKENS).to(device),
        block_sizes=SIZES,
    )
    return buffers, table


def same_memory(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    """Every tensor of buffers and table; but for the first token id of nobody, which the reference alone writes."""
    ours[1].token_ids[0, 0] = theirs[1].token_ids[0, 0] = 0
    for one, other in zip(ours, theirs, strict=True):
        for name in (each.name for each in fields(one)):
            for a, b in zip(*(_tensors(getattr(side, name)) for side in (one, other)), strict=True):
                equal(a, b, name)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    value = getattr(value, "dev", value)
    return [value] if isinstance(value, Tensor) else []


def steps(device: torch.device) -> None:
    """A mixed step, a padded step of decodes, staged writes, what the host tells, and results in an outbox's slots."""
    from framework_backends.cuda_step_ops import CudaStepOps

    ours, theirs, host = CudaStepOps(), step_ops, torch.device("cpu")
    counts = len(CHUNKS), sum(one[0] for one in CHUNKS), sum(one[2] for one in CHUNKS)
    drawn = torch.randint(0, 2**31, (len(DECODES),), generator=torch.Generator().manual_seed(1))
    memory, expected = step_memory(CHUNKS, device), step_memory(CHUNKS, host)
    ours.prepare(*memory, *counts, goes_on=False)
    theirs.prepare(*expected, *counts)
    ours.post_update(*memory, counts[0], counts[2], drawn[: counts[2]].to(device))
    theirs.post_update(*expected, counts[0], counts[2], drawn[: counts[2]])
    same_memory(memory, expected)
    memory, expected, count = step_memory(DECODES, device), step_memory(DECODES, host), len(DECODES)
    for one in (memory, expected):
        for table in one[1].block_table:
            table[0] = 0
        one[1].num_tokens.dev[0] = 0
    ours.prepare_decodes(*memory, count)
    theirs.prepare_decodes(*expected, count)
    ours.post_update(*memory, count, count, drawn.to(device))
    theirs.post_update(*expected, count, count, drawn)
    same_memory(memory, expected)
    _staged_writes(device, ours)
    _inbox(device, ours)
    _outbox(device)


def _staged_writes(device: torch.device, ours: Any) -> None:
    flat, values = torch.zeros(3000, dtype=torch.int32), torch.arange(1, 1702, dtype=torch.int32)
    starts, counts = [3, 2999, 40], [1, 0, 1500]
    on_device = flat.to(device, copy=True)
    ours.apply_spans(on_device, starts, counts, values.to(device))
    step_ops.apply_spans(flat, starts, counts, values[: sum(counts)])
    equal(on_device, flat, "spans")
    table, rows, staged = (torch.zeros(9, 1100).byte(), torch.tensor([7, 1, 8]), torch.full((3, 1100), 9).byte())
    on_device = table.to(device, copy=True)
    ours.apply_rows(on_device, rows.to(device), staged.to(device))
    step_ops.apply_rows(table, rows, staged)
    equal(on_device, table, "rows")


def _inbox(device: torch.device, ours: Any) -> None:
    ring = torch.arange(3 * 2 * 300).view(3, 2, 300)
    ring = ring.pin_memory() if device.type == "cuda" else ring
    told, turn = torch.zeros(2, 300, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    for number in (1, 2, 0):
        ours.receive(told, ring, turn, 290)
        equal(told[:, :290], ring[number, :, :290], "what the host has told")
        equal(told[:, 290:], torch.zeros(2, 10, dtype=torch.int64), "rows behind those of the step")


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gives: one piece larger than what is written at a time, and a small one."""

    large: Tensor
    small: Tensor


def _outbox(device: torch.device) -> None:
    from framework_backends.cuda_transfers import Outbox

    value = Result(normal((1500,), 1, torch.float32).to(device), torch.arange(3).to(device))
    outbox = Outbox(value, device)
    for _ in range(5):  # once around the ring
        outbox.write(value)
        slot = outbox.next()
        wait(device)
        found = slot.value
        equal(found.large, value.large, "large piece")
        equal(found.small, value.small, "small piece")


# --------------------------------------------------------------------------------------------------- layers, products


def layers(device: torch.device) -> None:
    """Norms, gate and rotation over views of fused products: few rows, which overlap launches, and many."""
    from framework_backends.cuda_layer_ops import CudaLayerOps

    ours = CudaLayerOps()
    for count in (3, 65):
        heads, weight = normal((count, 5, 72), 1), normal((72,), 2)
        near(ours.rms_norm(heads.to(device)[:, :3], weight.to(device), 1e-5),
             layer_reference.rms_norm(heads[:, :3], weight, 1e-5))  # fmt: skip
        x, residual = heads[:, 0], heads[:, 1]
        found = ours.add_rms_norm(x.to(device), residual.to(device, copy=True), weight.to(device), 1e-5)
        for one, other in zip(found, layer_reference.add_rms_norm(x, residual, weight, 1e-5), strict=True):
            near(one, other)
        gate_up = normal((count, 2 * 1100), 3)
        near(ours.silu_and_mul(gate_up.to(device)), layer_reference.silu_and_mul(gate_up))
        near(ours.gelu_tanh_and_mul(gate_up.to(device)), layer_reference.gelu_tanh_and_mul(gate_up))
        near(ours.soft_cap(gate_up.to(device, copy=True), 2.0), layer_reference.soft_cap(gate_up, 2.0))
        wide = weight.float()
        near(ours.rms_norm(heads.to(device)[:, :3], wide.to(device), 1e-5),
             layer_reference.rms_norm(heads[:, :3], wide, 1e-5))  # fmt: skip
        cos, sin = normal((2, count, 1, 72), 4, torch.float32)
        near(ours.rotate(heads.to(device)[:, :3], cos.to(device), sin.to(device)),
             layer_reference.rotate(heads[:, :3], cos, sin))  # fmt: skip


LIKE = [((4096, 1024), (26, 1064)), ((4096, 14336), (70, 1064)), ((151936, 1024), (70, 136))]
"""(shape whose tiles are taken, shape of the weight that they are tried on): pieces and tiles that do not fit."""
ROW_COUNTS = (1, 4, 40)


def products(device: torch.device) -> None:
    """Products of one, few and some rows with the tiles of real weights, with and without norm, bias and gate."""
    from framework_backends.cuda_linear import CudaLinear, CudaLinearPacker, choose_tiles
    from framework_backends.triton.launches import launches_dependent

    for real, shape in LIKE:
        weight, bias = normal(shape, 1, torch.float32).mul_(shape[1] ** -0.5).to(DTYPE), normal(shape[:1], 2)
        tiles = choose_tiles(DTYPE, *real)
        packed = partial(CudaLinear, weight.to(device), tiles=tiles, dependent=launches_dependent())
        _compare_products(packed(bias=None), packed(bias=bias.to(device)), weight, bias, device)
    weight, bias = normal((72, 136), 1) / 12, normal((72,), 2)
    for is_invariant in (False, True):
        plain, biased = (CudaLinearPacker(is_invariant).pack(weight.to(device), add) for add in (None, bias.to(device)))
        for count in (*ROW_COUNTS, 70):
            x = normal((count, 136), 3)
            near(plain(x.to(device)), functional.linear(x.float(), weight.float()))
            near(biased(x.to(device)), functional.linear(x.float(), weight.float(), bias.float()))
    wide = normal((72, 136), 1, torch.float32) / 12
    for is_invariant in (False, True):
        packed = CudaLinearPacker(is_invariant).pack(wide.to(device), None)
        for count in ROW_COUNTS:
            x = normal((count, 136), 3)
            near(packed.widened(x.to(device)), functional.linear(x.float(), wide), 1e-5)


def _compare_products(plain: Any, biased: Any, weight: Tensor, bias: Tensor, device: torch.device) -> None:
    width = weight.shape[1]
    factor = 1 + normal((width,), 5) / 4
    for count in ROW_COUNTS:
        x, residual = normal((count, width + 8), 3)[:, :width], normal((count, width), 4)
        near(plain(x.to(device)), functional.linear(x.float(), weight.float()))
        stream = x + residual
        normed = layer_reference.rms_norm(stream, factor, 1e-5)
        product = functional.linear(normed.float(), weight.float(), bias.float())
        given = x.to(device), residual.to(device), factor.to(device), 1e-5
        found, carried = biased.gated_after_norm(*given)
        near(found, layer_reference.silu_and_mul(product))
        near(carried, stream)
        # Of more rows than one `after_norm` is a norm and the product, in a launch each.
        found = biased.after_norm(*given)[0] if count == 1 else biased(normed.to(device))
        near(found, product)


# ------------------------------------------------------------------------------------------------------------ sampler

VOCAB, COLUMNS = 4296, 40
"""Two blocks of ids, the last one with few; entries of a request column."""
IN_PROMPT = 1 << 30
OFF, LOWEST, HIGHEST = 0, -1.5, torch.inf


def sampler(device: torch.device) -> None:
    """Every operation in a chain, thresholds, greedy rows and draws alone, with one launch and with two, logprobs."""
    from framework_backends.triton.sampler_ops import IN_PLACE, SELECT, THRESHOLDS, TritonSamplerOps

    ops = TritonSamplerOps()
    logits, rows, chain = normal((4, VOCAB), 1) * 2, logits_rows([2, 5, 1, 3]), operations()
    assert {name for name, _ in chain} | {"argmax"} == set(TritonSamplerOps.fuses), "an operation is not tried"
    changed, limits = (tuple(one for one in chain if one[0] in names) for names in (IN_PLACE, THRESHOLDS))
    expected = processed(logits, rows, dict(chain))
    near(ops.apply(logits.to(device), rows_on(rows, device), chain_on(changed, device)), expected, 1e-4)
    lo, hi = torch.tensor([LOWEST, *[-HIGHEST] * 3]), torch.full((4,), HIGHEST)
    interval = lo.to(device), hi.to(device)
    wanted = bounds(expected, rows, dict(limits), lo)
    for one in (ops, TritonSamplerOps(capacity=64)):  # more candidates than are listed
        found = one.bounds(expected.to(device), rows_on(rows, device), chain_on(limits, device), *interval)
        near(found[0], wanted, 1e-2)
    draws = dict(chain)["draw"]["draws"][rows.req_idx] != 0
    choice = ops.sample(logits.to(device), rows_on(rows, device), chain_on(chain, device), interval)
    compare_choice(choice, expected, torch.where(draws, wanted, lo), draws)
    # Large batches draw in a second launch, and a program tells two blocks of logprobs; few rows for the interpreter.
    for one, count in ((ops, 3), (TritonSamplerOps(goes_on=False), 33 if device.type == "cuda" else 3)):
        rows, few = logits_rows(list(range(1, count + 1))), normal((count, 700), 3)
        open_lo = torch.full((count,), -HIGHEST)
        for last in SELECT:
            ends = chain_on([(last, dict(chain).get(last, {}))], device)
            choice = one.sample(few.to(device), rows_on(rows, device), ends, None)
            draws = dict(chain)["draw"]["draws"][rows.req_idx] != 0 if last == "draw" else torch.zeros(count).bool()
            compare_choice(choice, few.float(), open_lo, draws)
        compare_logprobs(one, few, device)


def logits_rows(req_idx: list[int]) -> Rows:
    index, count = torch.tensor(req_idx), len(req_idx)
    none = torch.zeros(count, dtype=torch.int32)
    return Rows(index, none, index + 5, index * 7919, index.view(-1, 1)[:, :0], none, np.array(req_idx, np.int32))


def rows_on(rows: Rows, device: torch.device) -> Rows:
    names = ("req_idx", "offset", "position", "seed", "drafts", "num_drafts")
    return replace(rows, **{name: getattr(rows, name).to(device) for name in names})


def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A request column, strided as in the table: entry i is values[i % n]."""
    packed = torch.zeros(COLUMNS, 3, dtype=dtype)
    packed[:, 1] = torch.tensor(list(values), dtype=dtype).repeat(COLUMNS)[:COLUMNS]
    return packed[:, 1]


def chain_on(chain: Sequence[tuple[str, Any]], device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    """The operations with their operands on a device; columns stay strided."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor) and value._base is not None:
            return value._base.to(device)[:, 1]
        return value.to(device) if isinstance(value, Tensor) else value

    return [(name, {key: moved(value) for key, value in operands.items()}) for name, operands in chain]


def operations() -> list[tuple[str, dict[str, Any]]]:
    """All in their order. Each concerns some rows; ids lie in the first and in the last block."""
    rng = torch.Generator().manual_seed(7)
    ints, floats = (partial(column, dtype=dtype) for dtype in (torch.int32, torch.float32))

    def bits(count: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (count, -(-VOCAB // 32)), generator=rng).int()

    ids = torch.tensor([[-1, 0, 0], [3, VOCAB - 1, 200]], dtype=torch.int32)
    seen = torch.zeros(3, VOCAB, dtype=torch.int32)
    seen[1, 7:30], seen[2, VOCAB - 9 :] = 2, IN_PROMPT + 1
    places = ints([0, 1, 2])
    return [
        ("bitmask", {"words": bits(2), "logits_rows": torch.tensor([0, 2])}),
        ("allowed", {"words": bits(3), "place": ints([0, 2, 0, 1, 0])}),
        ("ban_until", {"until": ints([9]), "ids": ids[[0, 1]].repeat(COLUMNS // 2, 1)}),
        ("bias", {"count": ints([0, 3]), "ids": ids.clone(), "ids_place": ints([0, 1]),
                  "values": torch.tensor([[0.0] * 3, [2.0, -1.0, 3.0]]), "values_place": ints([0, 1])}),
        ("penalties", {"repetition": floats([1.0, 1.4]), "frequency": floats([0.0, 0.3]), "presence": floats([0.5]),
                       "seen": seen, "place": places}),
        ("scale", {"factor": floats([1.0, 0.7, 1.5])}),
        ("min_p", {"log_min_p": floats([-torch.inf, -4.0])}),
        ("top_k", {"k": ints([0, 50, 0, 0])}),
        ("top_p", {"top_p": floats([1.0, 1.0, 0.9, 0.5])}),
        ("draw", {"draws": ints([1, 1, 1, 1, 0, 0])}),
    ]  # fmt: skip


def processed(logits: Tensor, rows: Rows, chain: dict[str, dict[str, Any]]) -> Tensor:
    """[L, V] float32 logits behind the masks and elementwise operations, a row at a time."""
    return torch.stack([_processed_row(x, i, rows, chain) for i, x in enumerate(logits.float())])


def _processed_row(x: Tensor, row: int, rows: Rows, chain: dict[str, dict[str, Any]]) -> Tensor:
    request, position = int(rows.req_idx[row]), int(rows.position[row])
    masks = []
    grammar, allowed, bans, bias, penalties = (
        chain[name] for name in ("bitmask", "allowed", "ban_until", "bias", "penalties")
    )
    if row in grammar["logits_rows"]:
        masks.append(grammar["words"][grammar["logits_rows"].tolist().index(row)])
    if allowed["place"][request]:
        masks.append(allowed["words"][allowed["place"][request]])
    for words in masks:
        x = x.masked_fill((words.unsqueeze(1) >> torch.arange(32) & 1).flatten()[: len(x)] == 0, -torch.inf)
    for token in bans["ids"][request].tolist() if position < bans["until"][request] else ():
        if token < 0:
            break
        x[token] = -torch.inf
    for i in range(int(bias["count"][request])):
        x[int(bias["ids"][bias["ids_place"][request], i])] += bias["values"][bias["values_place"][request], i]
    if place := penalties["place"][request]:
        seen, repetition = penalties["seen"][place], penalties["repetition"][request]
        x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        count = seen % IN_PROMPT
        lowered = x - (count * penalties["frequency"][request] + penalties["presence"][request])
        x = torch.where(count > 0, lowered, x)
    return x * chain["scale"]["factor"][request]


def bounds(logits: Tensor, rows: Rows, limits: dict[str, dict[str, Tensor]], lo: Tensor) -> Tensor:
    """[L] lowest logits behind min-p, top-k and top-p, of those from lo on."""
    found = []
    for x, request, low in zip(logits, rows.req_idx.tolist(), lo.tolist(), strict=True):
        floor = max(low, float(x.max() + limits["min_p"]["log_min_p"][request]))
        k, p = int(limits["top_k"]["k"][request]), float(limits["top_p"]["top_p"][request])
        kept = x[x >= floor].sort(descending=True).values.double()
        kept = kept[:k] if k else kept
        mass = kept.softmax(0).cumsum(0)
        if p < 1:
            kept = kept[: int((mass < p).sum()) + 1]
        found.append(float(kept[-1]) if k or p < 1 else floor)
    return torch.tensor(found)


def compare_choice(choice: Any, logits: Tensor, lo: Tensor, draws: Tensor) -> None:
    """Tokens are kept ones, and the best where nothing is drawn; what is told of them is that of the logits."""
    ids = choice.ids.cpu()
    value = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    best = logits.max(1).values
    equal(choice.told, ids, "told ids")
    near(choice.top, best, 1e-4)
    near(choice.value, value, 1e-4)
    assert (value >= lo - 1e-2).all(), "a token was drawn that is not kept"
    near(value[~draws], best[~draws], 1e-4)
    mass = logits.masked_fill(logits < lo.unsqueeze(1) - 1e-4, -torch.inf).logsumexp(1)
    near(choice.log_sum.cpu()[draws], mass[draws], 1e-2)


def compare_logprobs(ops: Any, logits: Tensor, device: torch.device) -> None:
    ids = torch.arange(len(logits)) * 7
    for is_log in (True, False):
        told = ops.logprobs(logits.to(device), ids.to(device), 5, is_log=is_log)
        wide = logits.float()
        numbers = wide.log_softmax(1) if is_log else wide
        own = wide.gather(1, ids.unsqueeze(1))
        near(told.sampled, numbers.gather(1, ids.unsqueeze(1)).squeeze(1), 1e-4)
        equal(told.rank, (1 + (wide > own).sum(1)).int(), "ranks")
        near(told.top_logprobs, numbers.topk(5).values, 1e-4)
        near(numbers.gather(1, told.top_ids.cpu()), numbers.topk(5).values, 1e-4)


# ---------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attended:
    """A step of one form.

    has_rotation, has_norms  whether its heads come as projections, and are normalised as well
    is_whole                 whether it is as long as a step may be, and goes through a library
    num_padding              rows at its end that pad a step of decodes
    """

    case: AttentionCase
    has_rotation: bool = True
    has_norms: bool = False
    is_invariant: bool = False
    is_whole: bool = False
    num_padding: int = 0


_SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
_CAPPED: dict[str, Any] = {"softcap": 1.5, "has_sinks": True, **_SHAPE}
ATTENDED = (
    Attended(AttentionCase("parts that are merged", (150, 3, 0, 0), (1, 1, 1, 1), **_SHAPE), has_norms=True,
             num_padding=1),
    Attended(AttentionCase("decodes of one part", (20, 64), (1, 1), **_SHAPE)),
    Attended(AttentionCase("decode, chunk, prompt, padding", (70, 33, 0, 0), (1, 18, 25, 0), padding_tokens=3,
                           **_SHAPE), has_norms=True),
    Attended(AttentionCase("window", (40, 10, 0), (1, 30, 20), window=24, **_SHAPE), has_rotation=False),
    Attended(AttentionCase("invariant", (40, 0), (1, 20), **_SHAPE), is_invariant=True),
    Attended(AttentionCase("wide heads", (30, 0), (1, 20), num_heads=3, num_kv_heads=1, head_dim=80),
             has_rotation=False),
    Attended(AttentionCase("parts with sinks that are merged", (150, 3), (1, 1), **_CAPPED), has_rotation=False),
    Attended(AttentionCase("soft cap and sinks", (70, 33, 0), (1, 18, 25), **_CAPPED), has_rotation=False),
    Attended(AttentionCase("soft cap and sinks in a window", (70, 33, 0), (1, 18, 25), window=24, **_CAPPED),
             has_rotation=False),
    Attended(AttentionCase("whole prompt", (0,), (40,), **_SHAPE), is_whole=True),
)  # fmt: skip


def attention(device: torch.device) -> None:
    """Steps of decodes, of prompts and of both, each against the float64 reference."""
    for one in ATTENDED:
        for block_size in (32, 16) if one.has_norms else (32,):
            try:
                _attend(one, block_size, device)
            except AssertionError as error:
                raise AssertionError(f"{one.case.name}, blocks of {block_size}: {error}") from error


def _attend(one: Attended, block_size: int, device: torch.device) -> None:
    from framework_attention.triton import attention as plugin
    from framework_attention.triton import library

    case, built = one.case, build(one.case, block_size, DTYPE)
    most = case.num_tokens if one.is_whole else 256
    backend: Any = SimpleNamespace(name="sanitize", device=device)
    ctx = AttentionContext(backend, block_size, DTYPE, 8, most, 4096, one.is_invariant)
    attending = plugin.TritonAttention({}, ctx)
    scale = case.head_dim**-0.5
    spec = case.layer(None if built.sinks is None else built.sinks.to(device))
    # The library's own kernel is not ours to check, and torch's plain one serves as well around `turn_kernel`.
    words: dict[str, Any] = {"MIN_TOKENS": 1, "BACKEND": torch.nn.attention.SDPBackend.MATH} if one.is_whole else {}
    with mock.patch.multiple(library, **words) if words else nullcontext():
        attending.bind([spec], [_past_kv(built, attending.kv_spec(spec).shape, block_size).to(device)])
        batch = _on_device(built.batch, device)
        real = case.num_tokens - one.num_padding
        if one.num_padding:
            batch.seq_lens[-one.num_padding :] = 0
        plan = attending.plan(batch, 0)
        if not one.has_rotation:
            out = plan.forward(0, built.q.to(device), built.k.to(device), built.v.to(device))
        else:
            out = _attend_projections(plan, built, one, device)
    expected = attention_reference(built, scale)
    near(out[:real], expected[:real])
    assert out[real:].abs().sum() == 0, "padding rows are not 0"


def _past_kv(built: Any, shape: Sequence[int], block_size: int) -> Tensor:
    """KV memory that is NaN but for the keys and values of earlier steps."""
    kv = torch.full([built.num_blocks if size == -1 else size for size in shape], torch.nan, dtype=DTYPE)
    by_slot = kv.transpose(2, 3).transpose(1, 2)  # [blocks, block_size, 2, Hk, D]
    for (k, v), slots in zip(built.past, built.past_slots, strict=True):
        by_slot[slots // block_size, slots % block_size] = torch.stack((k, v), 1)
    return kv


def _on_device(batch: Any, device: torch.device) -> Any:
    names = ("query_start_loc", "seq_lens", "idx_mapping", "positions")
    moved = {name: getattr(batch, name).to(device, copy=True) for name in names}
    groups = {name: tuple(one.to(device) for one in getattr(batch, name)) for name in ("slot_mapping", "block_table")}
    return replace(batch, **moved, **groups)


def _attend_projections(plan: Any, built: Any, one: Attended, device: torch.device) -> Tensor:
    """The step's output; what the reference reads of it becomes normalised and rotated."""
    heads, dim = torch.cat((built.q, built.k, built.v), dim=1), one.case.head_dim
    angles = normal((256, dim // 2), 3, torch.float32)
    cos, sin = angles.cos().repeat(1, 2), angles.sin()
    table = torch.stack((cos, torch.cat((-sin, sin), 1)), 1)
    weights = 1 + normal((2, dim), 4) / 4
    norms = HeadNorms(weights[0].to(device), weights[1].to(device), 1e-5) if one.has_norms else None
    positions = built.batch.positions
    out = plan.forward_projections(0, heads.to(device), Rotation(table.to(device), positions.to(device)), norms)
    own = [cosine_or_sine.unsqueeze(1) for cosine_or_sine in table[positions].unbind(1)]
    for name, weight in zip(("q", "k"), weights, strict=True):
        turned = getattr(built, name)
        turned = layer_reference.rms_norm(turned, weight, 1e-5) if one.has_norms else turned
        setattr(built, name, layer_reference.rotate(turned, *own))
    return out


# ------------------------------------------------------------------------------------------------- latents and experts

LATENT = (
    AttentionCase("latent decodes", (150, 3, 0), (1, 1, 1), num_heads=2, latent=LatentSizes()),
    AttentionCase("latent decode, chunks, padding", (70, 33, 0, 0), (1, 40, 25, 0), num_heads=2, padding_tokens=3,
                  latent=LatentSizes()),
)  # fmt: skip
EXPERTS = 6


def latents(device: torch.device) -> None:
    """Steps of decodes and of prompts over latents, with and without norm and rotation, behind a step of prompts."""
    from framework_attention.triton.latent import LatentTriton

    plugin = AttentionPlugin(LatentTriton, lambda dtype: SimpleNamespace(
        name="sanitize", device=device, allocate_kv=lambda specs, n: [
            torch.zeros([n if size == -1 else size for size in spec.shape], dtype=spec.dtype, device=device)
            for spec in specs
        ],
    ))  # fmt: skip
    for case in LATENT:
        built = build(case, 32, DTYPE)
        real = sum(case.scheduled)
        for turning in (None, *turnings(built)):
            engine = AttentionEngine(plugin, built, 32)
            compute_past(engine, built, 32)
            if turning is None:
                out, wanted = engine.step(built.batch, built.q, built.k, built.v), built
            else:
                out, wanted = engine.project(engine.planned(built.batch), built, turning), turning.turned(built)
            near(out[:real], attention_reference(wanted, case.scale)[:real])
            assert out[real:].abs().sum() == 0, f"{case.name}: padding is not 0"


def experts(device: torch.device) -> None:
    """Mixtures of few tokens, row by row, and of more, grouped by expert, with and without biases."""
    from framework_backends.cuda_experts import CudaExpertsPacker

    plain = ExpertWeights(normal((EXPERTS, 48, 40), 1) / 6, normal((EXPERTS, 40, 24), 2) / 4)
    biased = replace(plain, gate_up_bias=normal((EXPERTS, 48), 3), down_bias=normal((EXPERTS, 40), 4),
                     activation="clamped", limit=0.7)  # fmt: skip
    for weights, few in ((plain, 1), (biased, 3)):
        routing = Routing(2, normalizes=True)
        ours, expected = (
            CudaExpertsPacker(False).pack(_on(weights, device), routing),
            ReferenceExperts(weights, routing),
        )
        for count in (few, 40):
            x, logits = normal((count, 40), 5), normal((count, EXPERTS), 6, torch.float32)
            near(ours(x.to(device), logits.to(device)), expected(x, logits))
        equal(ours.counts, expected.counts, "how many tokens an expert was given")


def _on(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    tensors = {one.name: getattr(weights, one.name) for one in fields(weights)}
    return replace(weights, **{name: one.to(device) for name, one in tensors.items() if isinstance(one, Tensor)})


# ---------------------------------------------------------------------------------------------------- what was launched

GROUPS: dict[str, Callable[[torch.device], None]] = {
    "steps": steps, "layers": layers, "products": products, "sampler": sampler, "attention": attention,
    "latents": latents, "experts": experts,
}  # fmt: skip


@dataclass
class Launches:
    """Of one kernel, as the host sees it: compiled, run and waited for."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class Tally:
    """Launches by kernel, (module, name)."""

    device: torch.device
    kernels: dict[tuple[str, str], Launches] = field(default_factory=dict)

    def watch(self, kind: Any) -> None:
        """Counts what this class of Triton's launches from here on."""
        run = kind.run

        def counted(kernel: Any, *args: Any, **words: Any) -> Any:
            start = time.perf_counter()
            result = run(kernel, *args, **words)
            wait(self.device)
            launches = self.kernels.setdefault((kernel.fn.__module__, kernel.fn.__name__), Launches())
            launches.count += 1
            launches.seconds += time.perf_counter() - start
            return result

        kind.run = counted

    def print_table(self) -> None:
        print(f"{'kernel':22}{'launches':>10}{'seconds':>10}")
        for (_, name), launches in sorted(self.kernels.items()):
            print(f"{name:22}{launches.count:10}{launches.seconds:10.2f}")


def kernels_of_ours() -> Iterator[tuple[str, str]]:
    """(module, name) of every kernel in PACKAGES: what Triton compiles, and is called by the host."""
    from triton.runtime.jit import KernelInterface

    for package in PACKAGES:
        for found in pkgutil.iter_modules(import_module(package).__path__):
            module = import_module(f"{package}.{found.name}")
            for name, value in vars(module).items():
                is_own = isinstance(value, KernelInterface) and value.fn.__module__ == module.__name__
                if is_own and name.endswith("_kernel"):
                    yield module.__name__, name


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launch_all(names: Sequence[str], *, interpret: bool) -> int:
    """Runs groups and prints what they launched; the exit code."""
    device = torch.device("cpu") if interpret else torch.device("cuda", 0)
    tally, failed = Tally(device), []
    tally.watch(_launching_class(interpret))
    for name in names:
        start = time.perf_counter()
        try:
            GROUPS[name](device)
        except Exception:
            failed.append(name)
            print(f"{name} failed: {traceback.format_exc(limit=-4)}")
        print(f"group {name}: {time.perf_counter() - start:.1f} s", flush=True)
    tally.print_table()
    missing = set(kernels_of_ours()) - set(tally.kernels) if set(names) == set(GROUPS) else set()
    for module, name in sorted(missing):
        print(f"never launched: {module}.{name}")
    return 1 if failed or missing else 0


def _launching_class(interpret: bool) -> Any:
    from triton.runtime import interpreter, jit

    if not interpret:
        return jit.JITFunction
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        """The interpreter converts ends of loops, arrays of one element, to int, which numpy no longer does."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, for what is meant: log of 0, products that wrap
    return interpreter.InterpretedFunction


# ------------------------------------------------------------------------------------------------- under the sanitizer


def find_sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(home / "bin"))


def compile_all(names: Sequence[str]) -> int:
    """Runs each group in a process of its own, all at once: the sanitized run finds its kernels compiled."""
    runs = [subprocess.Popen([sys.executable, __file__, "--only", name], stdout=subprocess.PIPE) for name in names]
    told = [run.communicate()[0].decode() for run in runs]
    for run, text in zip(runs, told, strict=True):
        if run.returncode:
            print(text)
    return max(run.returncode for run in runs)


def sanitize(sanitizer: str, tool: str, names: Sequence[str]) -> int:
    """Runs this script under a tool and prints what that found; the exit code."""
    # Without a cache of torch's each tensor ends where its allocation does, so that reads behind it are seen. Errors of
    # calls are not asked for: torch tries what a driver may refuse, and tells itself what matters.
    words = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    words += ["--report-api-errors", "no"] if tool == "memcheck" else []
    only = ["--only", names[0]] if len(names) == 1 else []
    start = time.perf_counter()
    done = subprocess.run(
        [*words, sys.executable, __file__, *only], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    print(report_of(done.stdout))
    print(f"{tool}: exit code {done.returncode} after {time.perf_counter() - start:.0f} s", flush=True)
    if "Device not supported" in done.stdout:
        return refuse(f"{tool} says that it does not support this device")
    return done.returncode if done.returncode or "SUMMARY: " in done.stdout else 1


def report_of(output: str, most: int = 60) -> str:
    """The script's own lines, and those of the sanitizer: `most` at the beginning, and its summary."""
    lines = output.splitlines()
    found = [line for line in lines if line.startswith("=====")]
    own = [line for line in lines if not line.startswith("=====")]
    summary = [line for line in found[most:] if "SUMMARY: " in line]
    return "\n".join([*own, *found[:most], *summary])


def refuse(reason: str) -> int:
    print(f"benchmarks/sanitize.py: {reason}, and nothing was checked", file=sys.stderr)
    return NOTHING_RUN


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=(*TOOLS, "all"), help="run under compute-sanitizer")
    parser.add_argument("--only", choices=tuple(GROUPS), help="one group of launches")
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [args.only] if args.only else list(GROUPS)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        return launch_all(names, interpret=True)
    if not torch.cuda.is_available():
        return refuse("torch sees no CUDA device here")
    if args.tool is None:
        return launch_all(names, interpret=False)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return refuse("compute-sanitizer is neither on PATH nor in CUDA_HOME/bin")
    if code := compile_all(names):
        return code
    tools = TOOLS if args.tool == "all" else (args.tool,)
    return max([sanitize(sanitizer, tool, names) for tool in tools])


if __name__ == "__main__":
    sys.exit(main())
