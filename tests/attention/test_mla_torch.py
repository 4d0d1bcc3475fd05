"""Latent attention on the CPU: absorbed equals expanded, in any chunks, pieces, blocks and company."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from framework.interfaces import AttentionContext, LayerSpec
from framework.testing.attention import LATENT_CASES, AttentionCase, BuiltCase, LatentSizes, build, reference
from framework_attention import mla_torch
from framework_attention.latent_rows import Widths, is_cheaper_expanded
from framework_attention.mla_torch import MlaTorch, SpanLatents

# float64: rounding of sums over up to 300 keys. float32: the same in units of its own. The others round scores,
# weights, absorbed queries and the result to 8 (bfloat16) or 11 (float16) bits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
SIZES = LatentSizes(nope=12, rope=8, rank=40, value=20)
"""Expanding saves products here, from some queries on: 2 rank > nope + value, as in any real model."""
HEADS = 4
by_name = {case.name: case for case in LATENT_CASES}


def step_of(computed: tuple[int, ...], scheduled: tuple[int, ...], dtype: torch.dtype, size: int = 8) -> BuiltCase:
    return build(AttentionCase("step", computed, scheduled, num_heads=HEADS, latent=SIZES), size, dtype)


def make_attention(built: BuiltCase, block_size: int, *, invariant: bool = False) -> tuple[MlaTorch, Tensor]:
    """The plugin over the layer of a case, and its memory."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    ctx = AttentionContext(SimpleNamespace(name="cpu"), block_size, built.q.dtype, batch_invariant=invariant, **limits)
    attention, layer = MlaTorch({}, ctx), built.case.layer(None)
    spec = attention.kv_spec(layer)
    kv = torch.zeros([built.num_blocks if size == -1 else size for size in spec.shape], dtype=spec.dtype)
    attention.bind([layer], [kv])
    return attention, kv


def run(built: BuiltCase, block_size: int = 8, *, invariant: bool = False) -> Tensor:
    """The plugin's answer, with a large value in every KV slot that the past does not fill."""
    attention, kv = make_attention(built, block_size, invariant=invariant)
    kv[1:] = 1e2 if built.q.dtype == torch.float16 else 1e4
    fill(kv, built)
    return forward(attention, built)


def fill(kv: Tensor, built: BuiltCase) -> None:
    """The past of each request in its slots."""
    for (latents, _), where in zip(built.past, built.past_slots, strict=True):
        kv.flatten(0, 1)[where] = latents[:, 0]


def forward(attention: MlaTorch, built: BuiltCase) -> Tensor:
    assert built.up is not None
    return attention.plan(built.batch, 0).forward_latent(0, built.q, built.k[:, 0], built.up)


def expands(monkeypatch: pytest.MonkeyPatch, *, from_queries: int) -> None:
    """Decides which form serves a request, by the number of its queries alone."""
    monkeypatch.setattr(mla_torch, "is_cheaper_expanded", lambda query_lens, *_: query_lens >= from_queries)


NEVER, ALWAYS = 1 << 30, 1


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("block_size", (16, 5))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_equals_the_expanded_reference(case: AttentionCase, block_size: int, dtype: torch.dtype) -> None:
    built = build(case, block_size, dtype)
    out = run(built, block_size)
    assert out.dtype == dtype and case.latent and out.shape == (case.num_tokens, case.num_heads, case.latent.value)
    torch.testing.assert_close(out.double(), reference(built, case.scale), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_output_with_fixed_bits_equals_the_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    built = build(case, 16, dtype)
    out, tolerance = run(built, 16, invariant=True).double(), TOLERANCE[dtype]
    torch.testing.assert_close(out, reference(built, case.scale), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_absorbed_equals_expanded(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(case, 8, torch.float64)
    expands(monkeypatch, from_queries=NEVER)
    absorbed = run(built)
    expands(monkeypatch, from_queries=ALWAYS)
    torch.testing.assert_close(run(built), absorbed, atol=1e-10, rtol=0)


@pytest.mark.parametrize("of_prompt", (NEVER, ALWAYS), ids=("absorbed", "expanded"))
@pytest.mark.parametrize("of_decode", (NEVER, ALWAYS), ids=("by_absorbed", "by_expanded"))
def test_decode_of_a_token_equals_its_row_of_the_prompt(
    of_prompt: int, of_decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step_of((0,), (30,), torch.float64)
    expands(monkeypatch, from_queries=of_prompt)
    expected = run(whole)
    expands(monkeypatch, from_queries=of_decode)
    for at in range(30):
        torch.testing.assert_close(run(part_of(whole, at, at + 1))[0], expected[at], atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", range(1, 25))
def test_chunks_of_any_size_equal_the_whole_prompt(size: int) -> None:
    whole = step_of((0,), (24,), torch.float64)
    parts = [run(part_of(whole, at, min(at + size, 24))) for at in range(0, 24, size)]
    torch.testing.assert_close(torch.cat(parts), run(whole), atol=1e-10, rtol=0)


def part_of(whole: BuiltCase, begin: int, end: int) -> BuiltCase:
    """The step that computes tokens begin .. end of one request's prompt, in blocks of its own."""
    part = step_of((begin,), (end - begin,), whole.q.dtype)
    past = [(whole.k[:begin], whole.v[:begin])]
    return replace(part, q=whole.q[begin:end], k=whole.k[begin:end], up=whole.up, past=past)


@pytest.mark.parametrize("piece", (8, 16, 24, 40))
@pytest.mark.parametrize("queries", (1, 7, 64))
def test_context_in_pieces_of_any_size_gives_the_same(
    piece: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = step_of((51,), (37,), torch.float64)
    expands(monkeypatch, from_queries=ALWAYS)
    monkeypatch.setattr(mla_torch, "_MIN_PIECE", 1)
    monkeypatch.setattr(mla_torch, "_MAX_EXPANDED", piece * HEADS * (SIZES.nope + SIZES.rope + SIZES.value))
    monkeypatch.setattr(mla_torch, "_MAX_SCORES", queries * HEADS * piece)
    torch.testing.assert_close(run(built), reference(built, built.case.scale), atol=1e-10, rtol=0)


@pytest.mark.parametrize("of_prompt", (NEVER, ALWAYS), ids=("absorbed", "expanded"))
def test_block_tables_change_nothing(of_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expands(monkeypatch, from_queries=of_prompt)
    whole, tables, outs = step_of((0,), (64,), torch.float32), [], []
    for seed in range(4):
        placed = build(replace(whole.case, computed=(40,), scheduled=(24,)), 8, torch.float32, seed)
        part = part_of(whole, 40, 64)
        part.batch, part.past_slots = placed.batch, placed.past_slots
        tables.append(part.batch.block_table[0][part.batch.rows_np[0]].tolist())
        outs.append(run(part))
    assert len({tuple(table) for table in tables}) == 4
    torch.testing.assert_close(torch.stack(outs), outs[0].expand(4, -1, -1, -1), atol=1e-6, rtol=1e-6)


def test_latents_that_lie_together_are_read_where_they_lie() -> None:
    built = step_of((75,), (1,), torch.float64)
    scattered = run(built)
    built.batch.block_table[0][built.batch.rows_np[0], :10] = torch.arange(3, 13)
    built.num_blocks = 13
    built.past_slots = [torch.arange(24, 24 + 75)]
    built.batch.slot_mapping[0][0] = 24 + 75
    attention, kv = make_attention(built, 8)
    fill(kv, built)
    torch.testing.assert_close(forward(attention, built), scattered, atol=1e-12, rtol=0)
    (product,) = product_of(attention, built)
    assert product._latents(attention.layers[0]).data_ptr() == kv[3].data_ptr()


def product_of(attention: MlaTorch, built: BuiltCase) -> list[SpanLatents]:
    plan = attention.plan(built.batch, 0)
    plan.forward_latent(0, built.q, built.k[:, 0], built.up)
    (division,) = plan._divisions.values()
    return division._together._products


def test_decodes_are_cut_into_products_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    built = step_of((90, 5, 200, 7, 91), (1,) * 5, torch.float64)
    expected = run(built)
    monkeypatch.setattr(mla_torch, "_MAX_GATHERED_BYTES", 8 * (SIZES.rank + SIZES.rope) * 190)
    attention, kv = make_attention(built, 8)
    fill(kv, built)
    torch.testing.assert_close(forward(attention, built), expected, atol=1e-12, rtol=0)
    assert [product._shape[:2] for product in product_of(attention, built)] == [(1, 208), (2, 96), (2, 8)]


def test_latents_are_written_to_their_slots_and_nowhere_else() -> None:
    built = build(by_name["decodes_and_chunks_mixed"], 8, torch.bfloat16)
    attention, kv = make_attention(built, 8)
    forward(attention, built)
    slots, where = kv.flatten(0, 1), built.batch.slot_mapping[0]
    assert torch.equal(slots[where], built.k[:, 0])
    slots[where] = 0
    assert slots.abs().max() == 0


def test_padding_gives_zero_even_when_padding_queries_are_not_numbers() -> None:
    built = build(by_name["padding_rows_and_tokens"], 16, torch.float32)
    built.q[-5:] = float("nan")
    assert run(built, 16)[-5:].abs().max() == 0


@pytest.mark.parametrize("name", ("whole_prompt", "decode_whose_block_is_new", "decodes_and_chunks_mixed"))
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
@pytest.mark.parametrize("ahead", (0, 2))
def test_nan_of_a_former_owner_does_not_reach_a_request(name: str, invariant: bool, ahead: int) -> None:
    """Neither from a block that it begins, nor from those that it holds for the rest of its prompt."""
    built = build(replace(by_name[name], blocks_ahead=ahead), 16, torch.float32)
    attention, kv = make_attention(built, 16, invariant=invariant)
    used = {0} | {int(slot) // 16 for where in built.past_slots for slot in where}
    kv[[block for block in range(len(kv)) if block not in used]] = float("nan")
    fill(kv, built)
    out, expected = forward(attention, built).double(), reference(built, built.case.scale)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_views_of_a_fused_product_are_accepted() -> None:
    built = build(by_name["decodes_and_chunks_mixed"], 16, torch.float32)
    expected, width = run(built, 16), built.k.shape[-1]
    fused = torch.cat((built.q.flatten(1), built.k[:, 0]), dim=1)
    built.q, built.k = fused[:, :-width].view(built.q.shape), fused[:, None, -width:]
    torch.testing.assert_close(run(built, 16), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_with_fixed_bits_neighbours_and_chunks_change_no_bit(dtype: torch.dtype) -> None:
    whole = step_of((0,), (150,), dtype)
    expected = run(whole, invariant=True)
    for begin, end in ((0, 1), (0, 70), (64, 130), (149, 150), (3, 150)):
        part = part_of(whole, begin, end)
        assert torch.equal(run(part, invariant=True), expected[begin:end])
        assert torch.equal(run(among_others(part), invariant=True)[: end - begin], expected[begin:end])


def test_fast_form_depends_on_the_chunk_so_the_test_above_can_fail() -> None:
    whole = step_of((0,), (150,), torch.float32)
    assert not torch.equal(run(part_of(whole, 149, 150))[0], run(whole)[149])


def among_others(part: BuiltCase) -> BuiltCase:
    """The same request in front of two others."""
    (begin,), (count,) = part.case.computed, part.case.scheduled
    made = step_of((begin, 0, 200), (count, 9, 1), part.q.dtype)
    made.past[0], made.k[:count], made.q[:count] = part.past[0], part.k, part.q
    return replace(made, up=part.up)


def test_the_form_with_fewer_products_is_taken() -> None:
    """DeepSeek-V2-Lite: on a long context, expanding pays from 171 queries on; without one, always."""
    lite = Widths(heads=16, rank=512, rope=64, nope=128, value=128)
    lens = torch.tensor([[1, 0], [170, 100_000], [173, 100_000], [2, 0], [600, 8]]).numpy()
    assert is_cheaper_expanded(lens[:, 0], lens.sum(1), lite).tolist() == [False, False, True, True, True]
    narrow = replace(lite, rank=16)
    assert not is_cheaper_expanded(lens[:, 0], lens.sum(1), narrow).any()


@pytest.mark.parametrize(
    ("computed", "num_alone"), [((0, 0), 2), ((0, 2000), 1), ((2000, 2000), 0)], ids=("prompts", "mixed", "chunks")
)
def test_long_spans_are_expanded_and_short_ones_absorbed(computed: tuple[int, int], num_alone: int) -> None:
    built = step_of(computed, (9, 9), torch.float32)
    attention, _ = make_attention(built, 8)
    plan = attention.plan(built.batch, 0)
    plan.forward_latent(0, built.q, built.k[:, 0], built.up)
    (division,) = plan._divisions.values()
    assert len(division._alone) == num_alone and (division._together is None) == (num_alone == 2)


def test_one_latent_a_token_is_kept_and_nothing_else() -> None:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 values of 2 bytes are 30.4 KiB a token."""
    built = step_of((0,), (1,), torch.bfloat16)
    spec = make_attention(built, 16)[0].kv_spec(LayerSpec(0, "latent", 16, 1, 576, 192**-0.5, value_dim=512))
    assert spec.shape == (-1, 16, 576) and spec.block_bytes == 16 * 576 * 2
    assert 27 * spec.block_bytes / 16 == 31_104 == 30.375 * 1024
