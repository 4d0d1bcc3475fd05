"""The `mla_triton` attention plugin against the float64 reference that expands every key and value."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from framework.errors import ConfigError
from framework.interfaces import AttentionContext, LatentNorm, LayerSpec, Rotation
from framework.layers import ops
from framework.testing.attention import DEEPSEEK, LATENT_CASES, AttentionCase, LatentSizes, build

from .latent_steps import LatentStep

SMALL = LatentSizes(24, 16, 32, 20)
IN_INTERPRETER = ("padding_rows_and_tokens", "only_padding", "one_head", "heads_of_deepseek")
SMALL_DECODES = AttentionCase("small_decodes", (3, 70, 16), (1, 1, 1), num_heads=2, latent=SMALL)
SMALL_MIX = AttentionCase("small_mix", (12, 0, 20), (1, 5, 1), num_heads=2, latent=SMALL)
LONG = (
    AttentionCase("decodes_of_32k", (32767, 9000, 3), (1, 1, 1), num_heads=16, latent=DEEPSEEK),
    AttentionCase("many_decodes", tuple(range(40, 2100, 33)), (1,) * 63, num_heads=16, latent=DEEPSEEK),
    AttentionCase("decodes_of_128_heads", (1000, 3, 64, 129), (1, 1, 1, 1), num_heads=128, latent=DEEPSEEK),
    AttentionCase("chunk_on_a_prefix_of_8k", (8000, 0, 2000), (150, 30, 1), num_heads=16, latent=DEEPSEEK),
    AttentionCase("whole_prompts", (0, 0), (1100, 300), num_heads=16, latent=DEEPSEEK, padding_tokens=7),
)


@pytest.fixture
def step(device):
    """step(case, dtype, block_size=16, is_invariant=False, **fields of LatentShape)."""

    def make(case, dtype=torch.float32, block_size=16, seed=0, **words):
        return LatentStep(build(case, block_size, dtype, seed), device, block_size, **words)

    return make


def marked(case):
    return pytest.param(case, id=case.name, marks=() if case.name in IN_INTERPRETER else pytest.mark.cuda)


@pytest.mark.parametrize("case", [marked(case) for case in LATENT_CASES])
def test_output_equals_the_reference(step, case):
    one = step(case)
    one.assert_close(one.forward())


@pytest.mark.cuda
@pytest.mark.parametrize("case", (*LATENT_CASES, *LONG), ids=lambda case: case.name)
@pytest.mark.parametrize("block_size", (64, 32))
@pytest.mark.parametrize("is_invariant", (False, True), ids=("fast", "invariant"))
def test_output_in_bfloat16_equals_the_reference_on_a_device(step, case, block_size, is_invariant):
    one = step(case, torch.bfloat16, block_size, is_invariant=is_invariant)
    one.assert_close(one.forward())


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.bfloat16, 32), (torch.float16, 64), pytest.param(torch.float16, 128, marks=pytest.mark.full)],
)
def test_output_of_short_dtypes_equals_the_reference_in_any_block_size(step, dtype, block_size):
    for case in (SMALL_DECODES, SMALL_MIX):
        one = step(case, dtype, block_size)
        one.assert_close(one.forward())


@pytest.mark.parametrize("block_size", (16, pytest.param(32, marks=pytest.mark.full)))
def test_decodes_cut_in_many_parts_equal_the_reference(step, block_size):
    case = AttentionCase("parts", (350, 3, 90, 0), (1, 1, 1, 1), num_heads=3, latent=SMALL)
    one = step(case, torch.float32, block_size, min_keys=16, good_keys=16, programs_per_sm=40)
    (some,) = one.plan()._absorbed
    assert int(some.parts[:, 0].max()) > 16  # more than `expand_kernel` takes at a time
    first = one.forward()
    one.assert_close(first)
    assert torch.equal(one.forward(), first)


def test_latents_are_written_to_their_slots(step):
    for case in (SMALL_DECODES, SMALL_MIX):
        one = step(case, torch.bfloat16)
        one.forward()
        assert torch.equal(one.at_slots(), one.built.k[:, 0])


def test_padding_gives_zero_even_when_padding_queries_are_not_numbers(step):
    one = step(next(case for case in LATENT_CASES if case.name == "padding_rows_and_tokens"))
    one.built.q[-5:] = one.built.k[-5:] = float("nan")
    assert one.forward()[-5:].abs().max() == 0


def test_padding_rows_of_a_step_of_decodes_give_zero_and_write_nothing(step):
    case = AttentionCase("padded", (20, 0), (1, 1), num_heads=2, latent=SMALL)
    alone = step(case).forward()[:1]
    padded = step(case)
    padded.built.batch.seq_lens[1] = 0
    padded.built.batch.query_start_loc[:] = -1  # not told in such a step
    padded.built.q[1] = float("nan")
    out = padded.forward()
    assert torch.equal(out[:1], alone) and out[1].abs().max() == 0
    assert padded.at_slots()[1].isnan().all()


def test_views_of_wider_tensors_are_accepted_and_so_are_other_strides(step):
    one = step(SMALL_DECODES)
    expected, built = one.forward(), one.built
    fused = torch.cat((built.q.flatten(1), built.k.flatten(1)), dim=1)
    built.q = fused[:, : built.q[0].numel()].view_as(built.q)
    built.k = fused[:, built.q[0].numel() :].unsqueeze(1)
    assert torch.equal(one.forward(), expected)
    built.q = built.q.transpose(0, 1).contiguous().transpose(0, 1)
    one.up = replace(one.up, keys=torch.cat((one.up.keys, one.up.values), 1)[:, :24])
    assert torch.equal(one.forward(), expected)


@pytest.mark.parametrize("case", (SMALL_MIX, SMALL_DECODES), ids=lambda case: case.name)
@pytest.mark.parametrize("is_expanded", (False, True), ids=("absorbed", "expanded"))
@pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)), ids=str)
def test_projections_give_what_normalised_latents_and_rotated_heads_give(step, case, is_expanded, dtype, monkeypatch):
    from framework_attention.triton import latent

    if is_expanded:
        monkeypatch.setattr(latent, "_SHORT", 2)
    one, other = step(case, dtype), step(case, dtype)
    built, sizes, generator = one.built, case.latent, torch.Generator().manual_seed(3)
    table = torch.randn(400, 2, sizes.rope, generator=generator)
    weight = (1 + torch.randn(sizes.rank, generator=generator) / 4).to(dtype)
    cos, sin = table[built.batch.positions].unsqueeze(2).unbind(1)
    latents, key = built.k.split((sizes.rank, sizes.rope), dim=2)
    other.built.k = torch.cat((ops.rms_norm(latents, weight, 1e-5), ops.rotate(key, cos, sin)), dim=2)
    nope, rope = built.q.split((sizes.nope, sizes.rope), dim=2)
    other.built.q = torch.cat((nope, ops.rotate(rope, cos, sin)), dim=2)
    expected, on = other.forward(), one.device
    rotation, norm = Rotation(table.to(on), built.batch.positions.to(on)), LatentNorm(weight.to(on), 1e-5)
    q, latent = built.q.to(on), built.k[:, 0].to(on)
    out = one.plan().forward_latent_projections(0, q, latent, rotation, norm, one.up).cpu()
    # Products may be fused with sums here: a unit in the last place of what is written, and of what it leads to.
    rounding = {torch.float32: 4e-6, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(one.at_slots(), other.at_slots(), atol=rounding, rtol=rounding)
    torch.testing.assert_close(out, expected, atol=2 * rounding, rtol=2 * rounding)
    assert torch.equal(q.cpu(), built.q)


def test_more_tokens_than_are_absorbed_at_a_time_equal_the_reference(step, monkeypatch):
    from framework_attention.triton import latent

    monkeypatch.setattr(latent, "_MAX_ABSORBED", 4)
    one = step(SMALL_MIX)
    assert [some.num_queries for some in one.plan()._absorbed] == [4, 3]
    one.assert_close(one.forward())


def attention_on(device_type):
    from framework_attention.triton.latent import LatentTriton

    backend = SimpleNamespace(name="cpu", device=torch.device(device_type))
    return LatentTriton({}, AttentionContext(backend, 16, torch.float32, 8, 64, 64, False))


def test_a_backend_on_the_processor_is_refused(device, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="attention=mla_triton computes on a CUDA device, and backend=cpu on cpu"):
        attention_on("cpu")


def test_layers_of_two_head_shapes_in_one_group_are_refused(device):
    layers = [LayerSpec(i, "latent", heads, 1, 48, 0.25, value_dim=32) for i, heads in enumerate((4, 8))]
    with pytest.raises(ConfigError, match=r"several .heads, head_dim, value_dim.*Give each a group"):
        attention_on(device).bind(layers, [torch.zeros(2, 16, 48, device=device)] * 2)
