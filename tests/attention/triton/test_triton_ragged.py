"""Ragged steps: one plan of fixed shapes serves any split of at most T tokens over at most R rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from framework.interfaces import HeadNorms, PrefersOwnShape, Rotation
from framework.testing.attention import AttentionCase, build

T, R = 80, 5
SPLITS = (
    ((12, 0, 70, 33), (1, 25, 1, 18)),
    ((0,), (80,)),
    ((40, 3, 0, 64, 16), (1, 1, 1, 1, 1)),
    ((19, 0, 5, 40, 60), (30, 2, 1, 46, 1)),
    ((3, 0, 0, 0, 9), (2, 2, 2, 2, 72)),  # the most tiles that there may be
    ((), ()),
)
_ROW_TENSORS = ("query_start_loc", "seq_lens", "idx_mapping", "positions")


def case_of(split, **words):
    """A split with padding rows and tokens behind it."""
    computed, scheduled = ((*part, *(0,) * (R - len(part))) for part in split)
    return AttentionCase("split", computed, scheduled, padding_tokens=T - sum(scheduled), **words)


class Fixed:
    """A plugin with a ragged batch at fixed addresses, into which splits are copied one after the other."""

    def __init__(self, step_of, dtype, is_invariant=False, **words):
        self._step_of = lambda built: step_of(built, is_invariant=is_invariant)
        self._dtype, self._words = dtype, words
        widest = build(case_of(((110,) * R, (16,) * R), **words), 16, dtype)
        self.step = self._step_of(widest)
        host = {
            "rows_np": np.zeros(R, np.int32),
            "num_scheduled_tokens_np": np.zeros(R, np.int32),
            "seq_lens_max_np": np.full(R, 4096, np.int32),
        }
        self.batch = replace(self.step.batch(), **host, ragged=True)
        self.q, self.k, self.v = (t.to(self.step.device) for t in (widest.q, widest.k, widest.v))

    def plan(self):
        return self.step.attention.plan(self.batch, 0)

    def load(self, split, seed=0):
        """The split as a step of its own, of which the fixed memory holds a copy."""
        built = build(case_of(split, **self._words), 16, self._dtype, seed)
        built.sinks = self.step.built.sinks  # the layer's
        other = self._step_of(built)
        self.step.kv.fill_(float("nan"))
        self.step.kv[: len(other.kv)] = other.kv
        batch = other.built.batch
        for name in _ROW_TENSORS:
            getattr(self.batch, name).copy_(getattr(batch, name))
        self.batch.slot_mapping[0].copy_(batch.slot_mapping[0])
        table = self.batch.block_table[0]
        table.zero_()
        table[:, : batch.block_table[0].shape[1]] = batch.block_table[0]
        for mine, theirs in zip((self.q, self.k, self.v), (other.built.q, other.built.k, other.built.v), strict=True):
            mine.copy_(theirs)
        return other


@pytest.fixture
def dirty_memory(monkeypatch):
    """What is not written holds leftovers: records of work, and parts that are not numbers."""
    plain = torch.empty

    def leftover(*size, **words):
        made = plain(*size, **words)
        return made.fill_(3 if made.dtype is torch.int32 else float("nan"))

    monkeypatch.setattr(torch, "empty", leftover)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float16, {}),
        (torch.float16, {"window": 24}),
        (torch.float32, {}),
        (torch.float16, {"is_invariant": True}),
        (torch.float16, {"window": 24, "softcap": 1.5, "has_sinks": True}),
    ],
    ids=("fast", "window", "float32", "invariant", "window_softcap_and_sinks"),
)
def test_one_plan_gives_the_reference_for_any_split(step_of, dirty_memory, dtype, words):
    fixed = Fixed(step_of, dtype, **words)
    plan = fixed.plan()
    assert not plan.decodes
    for seed, split in enumerate(SPLITS):
        other = fixed.load(split, seed)
        plan._list_work(R)  # what a recorded step does again
        out = plan.forward(0, fixed.q, fixed.k, fixed.v).cpu()
        other.assert_close(out)
        assert int(fixed.step.attention.arrived.abs().sum()) == 0
        if "is_invariant" in words:
            assert torch.equal(out, other.forward())


def test_padding_queries_that_are_not_numbers_give_zero(step_of):
    fixed = Fixed(step_of, torch.float16)
    other = fixed.load(SPLITS[0])
    other.built.q[45:] = fixed.q[45:] = float("nan")
    out = fixed.plan().forward(0, fixed.q, fixed.k, fixed.v).cpu()
    other.assert_close(out)


def test_records_of_work_that_a_split_does_not_have_are_marked(step_of, dirty_memory):
    fixed = Fixed(step_of, torch.float16)
    for split in SPLITS:
        fixed.load(split)
        plan = fixed.plan()
        items, tiles = plan._items.cpu(), plan._tiles.cpu()
        scheduled, queries = np.array(split[1]), fixed.step.attention.tile_queries
        num_tiles = int((-(-scheduled[scheduled > 1] // queries)).sum())
        assert len(tiles) == R + (T - R) // queries
        assert (tiles[:num_tiles, 0] > 0).all() and (tiles[num_tiles:, 0] == 0).all()
        assert tiles[:num_tiles, 0].sum() == scheduled[scheduled > 1].sum()
        num_items = int((items[:, 0] > 0).sum())
        assert (items[num_items:, 0] == 0).all()
        assert len(items[items[:, 0] > 0, 2].unique()) == (scheduled == 1).sum()


@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
def test_no_split_has_more_work_than_its_bound_and_one_has_as_many_tiles(step_of, is_invariant):
    attention = Fixed(step_of, torch.float16, is_invariant).step.attention
    rng, queries = np.random.default_rng(0), attention.tile_queries
    for num_tokens, num_rows in ((9, 8), (9, 50), (40, 3), (300, 7), (1000, 64)):
        bound = attention.bounded(num_tokens, np.full(num_rows, 4096, np.int32))
        assert (bound.num_items == 0) == is_invariant
        assert bound.num_items <= len(attention.arrived)
        for _ in range(200):
            cuts = np.sort(rng.integers(0, num_tokens + 1, rng.integers(1, num_rows + 1)))
            scheduled = np.diff(cuts, prepend=0)
            scheduled = scheduled[scheduled > 0].astype(np.int32)
            work = attention.counted(scheduled, scheduled + rng.integers(0, 3000, len(scheduled), np.int32))
            assert work.num_tiles <= bound.num_tiles and work.num_items <= bound.num_items
        prompts = min(num_rows, num_tokens // attention.least)
        widest = np.full(prompts, attention.least, np.int32)
        widest[0] += num_tokens - widest.sum()
        spare = (attention.least - 1) * prompts  # tokens of a prompt behind its first may fill no tile
        assert bound.num_tiles - attention.counted(widest, widest).num_tiles <= -(-spare // queries)


def test_a_ragged_step_gets_the_tiles_of_a_prompt_as_long_as_it_is(step_of, monkeypatch):
    from framework_attention.triton import shapes

    fixed = Fixed(step_of, torch.float16)
    monkeypatch.setattr(shapes, "_LONG_KEYS", T + 1)
    assert fixed.plan()._prompt.tile == 64
    monkeypatch.setattr(shapes, "_LONG_KEYS", T)
    assert fixed.plan()._prompt.tile == 128


def test_steps_that_the_library_serves_prefer_their_own_shape(step_of):
    attention = Fixed(step_of, torch.float16).step.attention
    asked = []
    attention.whole = SimpleNamespace(serves=lambda *told: asked.append(told) or len(told[0]) == 1)
    one, two = np.array([T], np.int32), np.array([T - 1, 1], np.int32)
    assert isinstance(attention, PrefersOwnShape)
    assert [attention.prefers_own_shape(step, step) for step in (one, two)] == [True, False]
    assert [told[2] for told in asked] == [T, T]


@pytest.mark.cuda
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
@pytest.mark.parametrize("has_projections", (False, True), ids=("forward", "projections"))
@pytest.mark.parametrize("more", ({}, {"window": 24, "softcap": 1.5, "has_sinks": True}), ids=("plain", "all"))
def test_replays_of_one_ragged_capture_equal_eager_steps(step_of, is_invariant, has_projections, more):
    dtype, dim = torch.bfloat16, 64
    words = {"num_heads": 8, "num_kv_heads": 2, "head_dim": dim, **more}
    fixed = Fixed(step_of, dtype, is_invariant, **words)
    on = fixed.step.device
    if on.type != "cuda":
        pytest.skip("graphs are recorded on a CUDA device")
    rotation = Rotation(torch.randn(4096, 2, dim, device=on), fixed.batch.positions)
    norms = HeadNorms(*torch.rand(2, dim, device=on).to(dtype), 1e-6)

    def run():
        if has_projections:
            heads = torch.cat((fixed.q, fixed.k, fixed.v), dim=1)
            return fixed.plan().forward_projections(0, heads, rotation, norms)
        return fixed.plan().forward(0, fixed.q, fixed.k, fixed.v)

    fixed.load(SPLITS[0])
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, split in enumerate(SPLITS):
        results = []
        for replayed in (True, False):
            other = fixed.load(split, seed)
            if replayed:
                graph.replay()
            results.append((out if replayed else run()).clone())
        assert torch.equal(*results)
        if not has_projections:
            other.assert_close(results[0].cpu())
