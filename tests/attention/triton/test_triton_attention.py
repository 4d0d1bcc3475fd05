"""The `triton` attention plugin against the float64 reference, over the shared table of shapes."""

from types import SimpleNamespace

import pytest
import torch

from framework.errors import ConfigError
from framework.interfaces import AttentionContext, HeadNorms, LayerSpec, Rotation
from framework.layers import ops
from framework.testing.attention import CASES, LONG_CASES, AttentionCase

SMALL_MIX = AttentionCase("small_mix", (12, 0, 20), (1, 5, 1))
SMALL_DECODES = AttentionCase("small_decodes", (3, 70, 16), (1, 1, 1))
by_name = {case.name: case for case in CASES}
MIXED = ("decode_whose_block_is_new", "decodes_and_chunks_mixed")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_equals_the_reference(step, case):
    """Decodes in float32, prompts in a dtype in which they read the step's own keys where those lie."""
    one = step(case, torch.float16 if max(case.scheduled) > 1 else torch.float32)
    one.assert_close(one.forward())


@pytest.mark.cuda
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_output_of_long_contexts_equals_the_reference_on_a_device(step, case, dtype):
    one = step(case, dtype)
    one.assert_close(one.forward())


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(("dtype", "block_size"), [(torch.bfloat16, 32), (torch.float16, 64), (torch.bfloat16, 128)])
def test_output_of_short_dtypes_equals_the_reference_in_any_block_size(step, name, dtype, block_size):
    one = step(by_name[name], dtype, block_size)
    one.assert_close(one.forward())


@pytest.mark.parametrize("words", ({}, {"softcap": 1.5, "has_sinks": True}), ids=("plain", "softcap_and_sinks"))
@pytest.mark.parametrize("window", (None, 1, 70))
@pytest.mark.parametrize("block_size", (16, 32))
def test_decodes_cut_in_many_parts_equal_the_reference(step, window, block_size, words):
    shape = {"num_heads": 3, "num_kv_heads": 1, "window": window}
    case = AttentionCase("parts", (150, 3, 90, 0, 0), (1, 1, 1, 1, 0), **shape, **words)
    one = step(case, torch.float32, block_size, tile=16, min_keys=16, good_keys=16, programs_per_sm=8, few_per_sm=8)
    plan = one.plan()
    assert window == 1 or int(plan._items[:, 0].max()) > 3
    q, k, v = (t.to(one.device) for t in (one.built.q, one.built.k, one.built.v))
    first, again = plan.forward(0, q, k, v).cpu(), plan.forward(0, q, k, v).cpu()
    one.assert_close(first)
    assert torch.equal(first, again)
    assert int(one.attention.arrived.abs().sum()) == 0


def test_tiles_of_long_prompts_equal_the_reference(step, monkeypatch):
    from framework_attention.triton import shapes

    short, one = step(by_name["chunks_only"], torch.float16), step(by_name["chunks_only"], torch.float16)
    monkeypatch.setattr(shapes, "_LONG_KEYS", 1)
    assert one.attention.prompt(56).tile == 128
    one.assert_close(one.forward())
    monkeypatch.undo()
    assert short.attention.prompt(56).tile == 64 and one.attention.tile_queries == short.attention.tile_queries


def test_keys_and_values_are_written_to_their_slots(step):
    for case in (SMALL_MIX, SMALL_DECODES):
        one = step(case, torch.bfloat16)
        one.forward()
        assert torch.equal(one.at_slots(), torch.stack((one.built.k, one.built.v)))


def test_padding_gives_zero_even_when_padding_queries_are_not_numbers(step):
    one = step(by_name["padding_rows_and_tokens"])
    one.built.q[-5:] = float("nan")
    assert one.forward()[-5:].abs().max() == 0


def test_padding_rows_of_a_step_of_decodes_give_zero_and_write_nothing(step):
    case = AttentionCase("padded", (20, 0), (1, 1), num_heads=2, num_kv_heads=1)
    one = step(case)
    alone = one.forward()[:1]
    padded = step(case)
    padded.built.batch.seq_lens[1] = 0
    padded.built.batch.query_start_loc[:] = -1  # not told in such a step
    padded.built.q[1] = float("nan")
    out = padded.forward()
    assert torch.equal(out[:1], alone) and out[1].abs().max() == 0
    assert padded.at_slots()[:, 1].isnan().all()


def test_views_of_a_fused_product_are_accepted_and_so_are_other_strides(step):
    for case in (SMALL_MIX, SMALL_DECODES):
        one = step(case)
        expected, built = one.forward(), one.built
        fused = torch.cat((built.q, built.k, built.v), dim=1)
        built.q, built.k, built.v = fused.split((6, 2, 2), dim=1)
        assert torch.equal(one.forward(), expected)
        built.q = built.q.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(one.forward(), expected)


@pytest.mark.parametrize("case", (SMALL_MIX, SMALL_DECODES), ids=lambda case: case.name)
@pytest.mark.parametrize("has_norms", (True, False), ids=("norms", "no_norms"))
@pytest.mark.parametrize("has_rotation", (True, False), ids=("rotation", "no_rotation"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_projections_give_what_normalised_and_rotated_heads_give(step, case, has_norms, has_rotation, dtype):
    one, other = step(case, dtype), step(case, dtype)
    built, dim = one.built, 16
    heads = torch.cat((built.q, built.k, built.v), dim=1)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(400, 2, dim, generator=generator)
    weights = (1 + torch.randn(2, dim, generator=generator) / 4).to(dtype)
    norms = HeadNorms(*weights, 1e-5) if has_norms else None
    q, k = built.q, built.k
    if norms is not None:
        q, k = ops.rms_norm(q, norms.q_weight, norms.eps), ops.rms_norm(k, norms.k_weight, norms.eps)
    cos, sin = table[built.batch.positions].unsqueeze(2).unbind(1)
    if has_rotation:
        q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    other.built.q, other.built.k = q, k
    expected = other.forward()
    on = one.device
    rotation = Rotation(table.to(on), built.batch.positions.to(on)) if has_rotation else None
    norms = HeadNorms(weights[0].to(on), weights[1].to(on), 1e-5) if has_norms else None
    out = one.plan().forward_projections(0, heads.to(on), rotation, norms).cpu()
    # Products may be fused with sums here: a unit in the last place of what is written, and of what it leads to.
    rounding = {torch.float32: 4e-6, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(one.at_slots(), other.at_slots(), atol=rounding, rtol=rounding)
    torch.testing.assert_close(out, expected, atol=2 * rounding, rtol=2 * rounding)


def test_a_block_table_of_one_column_serves(step):
    one = step(AttentionCase("short", (3, 9), (1, 1), num_heads=2))
    one.built.batch.block_table = (one.built.batch.block_table[0][:, :1].contiguous(),)
    one.assert_close(one.forward())


def attention_on(device_type):
    from framework_attention.triton.attention import TritonAttention

    backend = SimpleNamespace(name="cpu", device=torch.device(device_type))
    return TritonAttention({}, AttentionContext(backend, 16, torch.float32, 8, 64, 64, False))


def test_a_backend_on_the_processor_is_refused(device, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="attention=triton computes on a CUDA device, and backend=cpu on cpu"):
        attention_on("cpu")


def test_layers_of_two_head_shapes_in_one_group_are_refused(device):
    layers = [LayerSpec(i, "full", heads, 2, 16, 0.25) for i, heads in enumerate((4, 8))]
    with pytest.raises(ConfigError, match=r"several .window, heads, KV heads, head_dim.*Give each a group"):
        attention_on(device).bind(layers, [torch.zeros(2, 2, 2, 16, 16, device=device)] * 2)
