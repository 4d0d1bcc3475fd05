"""Expanded prompts of `mla_triton`: any chunks, pieces and company give what the float64 reference gives."""

from dataclasses import replace

import pytest
import torch

from framework.testing.attention import DEEPSEEK, LATENT_CASES, AttentionCase, LatentSizes, build

from .latent_steps import LatentStep

SMALL = LatentSizes(24, 16, 32, 20)
by_name = {case.name: case for case in LATENT_CASES}
MIX = AttentionCase("mix", (12, 0, 70, 0, 33), (1, 25, 1, 0, 18), num_heads=2, padding_tokens=3, latent=SMALL)
TILE = 16
VALUES = 2 * (24 + 20)
"""Of a key of MIX: of keys and values in all heads."""


@pytest.fixture
def step(device, monkeypatch):
    """step(case, dtype, piece=None): rows of two tokens count as prompts, `piece` keys are expanded at a time."""
    from framework_attention.triton import latent

    def make(case, dtype=torch.float32, piece=None, is_invariant=False):
        monkeypatch.setattr(latent, "_SHORT", 2)
        if piece is not None:
            monkeypatch.setattr(latent, "_EXPANDED_VALUES", piece * VALUES)
        one = LatentStep(build(case, 16, dtype), device, 16, is_invariant=is_invariant)
        if device.type == "cpu":
            one.attention.prompt = replace(one.attention.prompt, queries=16, tile=TILE)
        return one

    return make


@pytest.mark.parametrize(
    "piece", (None, pytest.param(1, marks=pytest.mark.full), 48), ids=("whole", "pieces_of_a_tile", "pieces_of_three")
)
def test_prompts_beside_decodes_and_padding_equal_the_reference(step, piece):
    one = step(MIX, piece=piece)
    plan = one.plan()
    assert plan._prompts is not None and len(plan._absorbed) == 1
    out = one.forward()
    one.assert_close(out)
    assert out[-3:].abs().max() == 0
    assert torch.equal(one.at_slots()[:-3], one.built.k[:-3, 0])


@pytest.mark.parametrize(
    "name",
    (pytest.param("heads_of_deepseek", marks=pytest.mark.full), "one_head", "chunks_with_and_without_a_context"),
)
def test_prompts_in_bfloat16_equal_the_reference(step, name):
    one = step(by_name[name], torch.bfloat16)
    one.assert_close(one.forward())


def test_upper_bounds_of_lengths_change_nothing(step):
    one, other = step(MIX, piece=32), step(MIX, piece=32)
    other.built.batch.seq_lens_max_np[:3] += 40
    assert torch.equal(one.forward(), other.forward())


def test_pieces_and_upper_bounds_do_not_change_what_is_listed(step):
    one = step(MIX)
    one.built.batch.seq_lens_max_np[:3] += 100
    prompts = one.plan()._prompts
    tiles = prompts.tiles[prompts.tiles[:, 0] > 0].cpu()
    assert prompts.starts.tolist() == [0, 0, 32, 32, 32]  # decodes and padding take no place
    seen = sorted((first + i, position + i) for count, first, position in tiles[:, :3].tolist() for i in range(count))
    assert seen == [*((1 + i, i) for i in range(25)), *((27 + i, 33 + i) for i in range(18))]


def test_a_step_with_prompts_alone_absorbs_nothing(step):
    one = step(by_name["whole_prompt"])
    assert one.plan()._absorbed == []
    one.assert_close(one.forward())


def test_short_chunks_are_absorbed_and_all_queries_with_batch_invariant(device, step):
    short = LatentStep(build(MIX, 16, torch.float32), device, 16)
    assert short.plan()._prompts is None
    assert step(MIX, is_invariant=True).plan()._prompts is None


@pytest.mark.cuda
@pytest.mark.parametrize("num_heads", (16, 128))
@pytest.mark.parametrize("values", (1 << 26, 1 << 22), ids=("few_pieces", "many_pieces"))
def test_long_prompts_equal_the_reference_on_a_device(device, monkeypatch, num_heads, values):
    from framework_attention.triton import latent

    monkeypatch.setattr(latent, "_EXPANDED_VALUES", values)
    case = AttentionCase(
        "long", (3000, 0, 700, 64), (90, 300, 1, 128), num_heads=num_heads, padding_tokens=5, latent=DEEPSEEK
    )
    one = LatentStep(build(case, 64, torch.bfloat16), device, 64)
    assert one.plan()._prompts is not None
    one.assert_close(one.forward())
