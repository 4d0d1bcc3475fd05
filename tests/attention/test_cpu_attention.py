"""CPU attention against the float64 reference, over the shared table of shapes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from framework.batch import InputBatch
from framework.errors import ConfigError
from framework.interfaces import AttentionContext, LayerSpec
from framework.testing.attention import CASES, AttentionCase, BuiltCase, build, reference
from framework_attention.cpu import BoundLayer, CpuAttention, LoneDecode
from framework_attention.products import Scratch
from framework_attention.spans import Span

# float32: a few units in the last place of sums over up to 1500 keys. The others round scores, weights and the result
# to 8 (bfloat16) or 11 (float16) bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
by_name = {case.name: case for case in CASES}


def make_attention(
    case: AttentionCase,
    block_size: int,
    dtype: torch.dtype,
    num_blocks: int,
    *,
    invariant: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[CpuAttention, torch.Tensor]:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    backend = SimpleNamespace(name="cpu")
    ctx = AttentionContext(backend, block_size, dtype, batch_invariant=invariant, **limits)
    attention = CpuAttention({}, ctx)
    spec = case.layer(sinks)
    kv_spec = attention.kv_spec(spec)
    kv = torch.zeros([num_blocks if size == -1 else size for size in kv_spec.shape], dtype=kv_spec.dtype)
    attention.bind([spec], [kv])
    return attention, kv


def run(built: BuiltCase, block_size: int, *, invariant: bool = False) -> torch.Tensor:
    """The plugin's answer, with a large value in every KV slot that the request's past does not fill."""
    words = {"invariant": invariant, "sinks": built.sinks}
    attention, kv = make_attention(built.case, block_size, built.q.dtype, built.num_blocks, **words)
    kv[:, :, 1:] = 1e2 if built.q.dtype == torch.float16 else 1e4  # a float16 score of 1e4 keys would be infinite
    slots = kv.view(2, built.case.num_kv_heads, -1, built.case.head_dim)
    for (k, v), where in zip(built.past, built.past_slots, strict=True):
        slots[0][:, where], slots[1][:, where] = k.transpose(0, 1), v.transpose(0, 1)
    return attention.plan(built.batch, 0).forward(0, built.q, built.k, built.v)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("block_size", (8, 16, 32))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_output_equals_the_reference(case: AttentionCase, block_size: int, dtype: torch.dtype, invariant: bool) -> None:
    built = build(case, block_size, dtype)
    out = run(built, block_size, invariant=invariant)
    expected = reference(built, case.head_dim**-0.5)
    assert out.dtype == dtype and out.shape == built.q.shape
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_padding_gives_zero_even_when_padding_keys_are_not_numbers() -> None:
    built = build(by_name["padding_rows_and_tokens"], 16, torch.float32)
    built.q[-5:] = float("nan")
    assert run(built, 16)[-5:].abs().max() == 0


@pytest.mark.parametrize("case", ("whole_prompt", "decode_whose_block_is_new", "decodes_and_chunks_mixed"))
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_nan_of_a_former_owner_does_not_reach_a_new_block(case: str, invariant: bool) -> None:
    built = build(by_name[case], 16, torch.float32)
    attention, kv = make_attention(built.case, 16, torch.float32, built.num_blocks, invariant=invariant)
    fresh = torch.ones(built.num_blocks, dtype=torch.bool)
    fresh[0] = False
    for where in built.past_slots:
        fresh[where // 16] = False
    kv[:, :, fresh] = float("nan")
    slots = kv.view(2, built.case.num_kv_heads, -1, built.case.head_dim)
    for (k, v), where in zip(built.past, built.past_slots, strict=True):
        slots[0][:, where], slots[1][:, where] = k.transpose(0, 1), v.transpose(0, 1)
    out = attention.plan(built.batch, 0).forward(0, built.q, built.k, built.v)
    torch.testing.assert_close(out.double(), reference(built, built.case.head_dim**-0.5), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("case", ("decodes_of_many_lengths", "decodes_and_chunks_mixed"))
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_nan_of_a_former_owner_does_not_reach_a_request_that_holds_blocks_ahead(case: str, invariant: bool) -> None:
    """A request gets the blocks of its whole prompt at once, and computes them chunk by chunk."""
    built = build(by_name[case], 16, torch.float32)
    expected = run(built, 16, invariant=invariant)
    built.num_blocks += 1
    table = built.batch.block_table[0]
    for row, seq_len in zip(built.batch.rows_np, built.batch.seq_lens.tolist(), strict=False):
        table[row, -(-seq_len // 16) :] = built.num_blocks - 1
    attention, kv = make_attention(built.case, 16, torch.float32, built.num_blocks, invariant=invariant)
    kv[:, :, -1] = float("nan")
    slots = kv.view(2, built.case.num_kv_heads, -1, built.case.head_dim)
    for (k, v), where in zip(built.past, built.past_slots, strict=True):
        slots[0][:, where], slots[1][:, where] = k.transpose(0, 1), v.transpose(0, 1)
    out = attention.plan(built.batch, 0).forward(0, built.q, built.k, built.v)
    assert torch.equal(out, expected)


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else() -> None:
    built = build(by_name["decodes_and_chunks_mixed"], 8, torch.bfloat16)
    attention, kv = make_attention(built.case, 8, torch.bfloat16, built.num_blocks)
    attention.plan(built.batch, 0).forward(0, built.q, built.k, built.v)
    slots, where = kv.view(2, 2, -1, 16), built.batch.slot_mapping[0]
    assert torch.equal(slots[0][:, where], built.k.transpose(0, 1))
    assert torch.equal(slots[1][:, where], built.v.transpose(0, 1))
    slots[:, :, where] = 0
    assert slots.abs().max() == 0


def test_views_of_a_fused_product_are_accepted() -> None:
    built = build(by_name["decodes_and_chunks_mixed"], 16, torch.float32)
    expected = run(built, 16)
    fused = torch.cat((built.q, built.k, built.v), dim=1)
    built.q, built.k, built.v = fused.split((6, 2, 2), dim=1)
    assert torch.equal(run(built, 16), expected)


def test_long_chunk_is_cut_into_products_of_bounded_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(by_name["chunk_in_the_middle_of_a_block"], 16, torch.float32)
    whole = run(built, 16)
    monkeypatch.setattr("framework_attention.spans._MAX_SCORES", 6 * 64 * 7)
    attention, _ = make_attention(built.case, 16, torch.float32, built.num_blocks)
    plan = attention.plan(built.batch, 0)
    assert [span.num_queries for span in plan._spans] == [7, 7, 7, 7, 2]  # type: ignore[attr-defined]
    torch.testing.assert_close(run(built, 16), whole, atol=1e-6, rtol=1e-6)


def test_long_chunk_under_a_window_is_cut_into_products_of_few_keys() -> None:
    case = AttentionCase("chunk", (300,), (200,), window=40)
    built = build(case, 16, torch.float32)
    attention, _ = make_attention(case, 16, torch.float32, built.num_blocks)
    spans = attention.plan(built.batch, 0)._spans  # type: ignore[attr-defined]
    assert [span.num_queries for span in spans] == [64, 64, 64, 8]
    assert max(span.mask.shape[-1] for span in spans) <= 64 + 40 + 2 * 16
    torch.testing.assert_close(run(built, 16).double(), reference(built, case.scale), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_a_window_makes_decodes_of_long_contexts_read_few_blocks(invariant: bool) -> None:
    case = AttentionCase("long", (3000, 1000, 9), (1, 1, 1), window=40)
    built = build(case, 16, torch.float32)
    attention, _ = make_attention(case, 16, torch.float32, built.num_blocks, invariant=invariant)
    spans = attention.plan(built.batch, 0)._spans  # type: ignore[attr-defined]
    read = {int(block) for span in spans for block in span.blocks.flatten()}
    needed = {int(block) for row, end in zip(built.batch.rows_np, case.seq_lens, strict=True)
              for block in built.batch.block_table[0][int(row), max(0, end - 40) // 16 : -(-end // 16)]}  # fmt: skip
    assert read - {0} == needed


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework_attention.cpu._MAX_ALONE", 0)
    built = build(by_name["one_long_decode_among_short_ones"], 16, torch.float32)
    attention, _ = make_attention(built.case, 16, torch.float32, built.num_blocks)
    plan = attention.plan(built.batch, 0)
    assert sorted(span.blocks.shape for span in plan._spans) == [(1, 94), (3, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", (None, 8), ids=("whole", "window"))
@pytest.mark.parametrize("consecutive", (True, False), ids=("consecutive_blocks", "scattered_blocks"))
def test_a_lone_decode_reads_its_keys_where_they_lie(consecutive: bool, window: int | None) -> None:
    length, dim, size = 45, 16, 16
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 2, 9, size, dim, generator=generator)
    q = torch.randn(1, 6, dim, generator=generator)
    blocks = [4, 5, 6] if consecutive else [4, 1, 7]
    bound = BoundLayer.bind(LayerSpec(0, "full", 6, 2, dim, dim**-0.5, window), kv)
    mask = torch.zeros(1, 1, 1, 3 * size)
    span = Span(np.array([0]), 1, length, torch.tensor([blocks]), mask)
    first = 0 if window is None else length - window
    keys, values = kv[:, :, blocks].flatten(2, 3)[:, :, first:length].double().repeat_interleave(3, 1)
    weights = torch.softmax(keys @ q[0].double().unsqueeze(-1) * dim**-0.5, dim=1)
    expected = (weights * values).sum(1)
    torch.testing.assert_close(
        LoneDecode(bound, span, window, Scratch())(bound, q)[0].double(), expected, atol=2e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("case", "lengths", "num_expected"),  # of 38 steps; made anew where a span has no room for a further key
    (
        ("whole_prompt", [3, 15, 16, 17, 31, 40], (37, 38)),
        ("whole_prompt", [3, 900, 16, 7, 1100, 40], (34, 38)),
        ("whole_prompt", [3, 37, 20], (32, 37)),
        ("window", [3, 15, 16, 17, 31, 40], (37, 38)),
        ("window", [3, 37, 20], (32, 38)),
        ("window_softcap_and_sinks", [3, 15, 16, 17, 31, 40], (37, 38)),
    ),
    ids=("one_span", "cut", "each_alone", "window", "window_each_alone", "window_softcap_and_sinks"),
)
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_decodes_that_go_on_equal_a_plan_made_anew(
    case: str, lengths: list[int], num_expected: tuple[int, int], invariant: bool
) -> None:
    steps, replaced_at = 40, 25
    generator = torch.Generator().manual_seed(1)
    window, sinks = by_name[case].window, torch.randn(6, generator=generator) if by_name[case].has_sinks else None
    lasting, kv = make_attention(by_name[case], 16, torch.float32, 600, invariant=invariant, sinks=sinks)
    kv.normal_(generator=generator)
    table = torch.zeros(len(lengths) + 1, 100, dtype=torch.int32)
    blocks = (torch.randperm(599, generator=generator) + 1).tolist()
    lens, num_followed = list(lengths), 0
    for step in range(steps):
        if step == replaced_at:  # another request in the same row, at just the length that the former one would have
            table[3] = 0
        for row, length in enumerate(lens, start=1):
            for column in range(-(-length // 16)):
                if not table[row, column]:
                    table[row, column] = blocks.pop()
                    if step not in (0, replaced_at):  # its block was somebody else's
                        kv[:, :, table[row, column]] = torch.nan
            if window is not None:  # and what lies behind the window is somebody else's by now
                kv[:, :, table[row, : max(0, length - window) // 16].long()] = torch.nan
        batch = decode_batch(lens, table, goes_on=step not in (0, replaced_at))
        q, k, v = (torch.randn(len(lens), heads, 16, generator=generator) for heads in (6, 2, 2))
        before = lasting._plans.get(0)
        plan = lasting.plan(batch, 0)
        num_followed += plan is before
        fresh, memory = make_attention(by_name[case], 16, torch.float32, 600, invariant=invariant, sinks=sinks)
        memory.copy_(kv)
        expected = fresh.plan(batch, 0).forward(0, q, k, v)
        out = plan.forward(0, q, k, v)
        if invariant:
            assert torch.equal(out, expected)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
        lens = [n + 1 for n in lens]
    assert num_followed == num_expected[invariant]


def test_lone_decode_whose_layer_comes_late_reads_every_key() -> None:
    attention, kv = make_attention(by_name["whole_prompt"], 16, torch.float32, 40)
    generator = torch.Generator().manual_seed(1)
    kv.normal_(generator=generator)
    table = torch.arange(1, 37, dtype=torch.int32).view(9, 4)
    attention.plan(decode_batch([20, 35], table), 0)
    batch = decode_batch([21, 36], table, goes_on=True)
    q, k, v = (torch.randn(2, heads, 16, generator=generator) for heads in (6, 2, 2))
    out = attention.plan(batch, 0).forward(0, q, k, v)
    fresh, memory = make_attention(by_name["whole_prompt"], 16, torch.float32, 40)
    memory.copy_(kv)
    torch.testing.assert_close(out, fresh.plan(batch, 0).forward(0, q, k, v), atol=1e-6, rtol=1e-5)


def test_a_plan_goes_on_where_the_step_does_and_nowhere_else() -> None:
    attention, _ = make_attention(by_name["whole_prompt"], 16, torch.float32, 40)
    table = torch.arange(1, 37, dtype=torch.int32).view(9, 4)
    lens = [20, 21, 22, 23, 24]
    plan = attention.plan(decode_batch(lens, table), 0)
    assert attention.plan(decode_batch([n + 1 for n in lens], table, goes_on=True), 0) is plan
    assert attention.plan(decode_batch([n + 2 for n in lens], table), 0) is not plan


def test_decodes_of_one_product_are_bounded_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework_attention.spans._MAX_KEYS", 64)
    attention, _ = make_attention(by_name["whole_prompt"], 16, torch.float32, 40)
    table = torch.arange(1, 37, dtype=torch.int32).view(9, 4)
    plan = attention.plan(decode_batch([30, 30, 30, 30, 30], table), 0)
    assert [len(span.tokens) for span in plan._spans] == [2, 2, 1]  # type: ignore[attr-defined]


def decode_batch(lens: list[int], table: torch.Tensor, goes_on: bool = False) -> InputBatch:
    rows, positions = np.arange(1, len(lens) + 1, dtype=np.int32), np.array(lens) - 1
    slots = table.numpy()[rows, positions // 16] * 16 + positions % 16
    zeros = torch.zeros(len(lens), dtype=torch.int64)
    return InputBatch(
        input_ids=zeros, positions=torch.from_numpy(positions), query_start_loc=torch.arange(len(lens) + 1),
        seq_lens=torch.tensor(lens), idx_mapping=torch.from_numpy(rows).long(), logits_indices=zeros,
        expanded_idx_mapping=zeros, draft_offset=zeros, slot_mapping=(torch.from_numpy(slots).long(),),
        block_table=(table,), rows_np=rows, num_scheduled_tokens_np=np.ones(len(lens), np.int32),
        logits_rows_np=rows, seq_lens_max_np=np.array(lens, np.int32), goes_on=goes_on,
    )  # fmt: skip


def test_layers_of_one_group_with_two_windows_are_refused() -> None:
    attention, kv = make_attention(by_name["window"], 16, torch.float32, 4)
    layers = [LayerSpec(i, "full", 6, 2, 16, 0.25, window) for i, window in enumerate((8, 16))]
    with pytest.raises(ConfigError, match="one KV group holds windows"):
        attention.bind(layers, [kv, kv])


def test_block_bytes_count_keys_and_values_of_every_head() -> None:
    attention, _ = make_attention(by_name["one_decode"], 16, torch.bfloat16, 4)
    spec = attention.kv_spec(LayerSpec(0, "full", 9, 3, 64, 0.125))
    assert (spec.shape, spec.block_bytes) == ((2, 3, -1, 16, 64), 2 * 3 * 16 * 64 * 2)
