"""What latent attention is declared with: the scale of its scores, and memory for one latent a token."""

from types import SimpleNamespace

import pytest
import torch

from framework.interfaces import ModelContext
from framework.layers import ops
from framework.layers.latent import LatentAttention, LatentSizes, attention_scale
from framework.layers.rope import Rotary, read_rope
from framework_loaders.dummy import DummySource

SIZES = LatentSizes(hidden_size=16, num_heads=2, query_rank=None, rank=6, nope_dim=5, rope_dim=4, value_dim=3)


def test_mscale_scales_scores_twice():
    """DeepSeek-V2-Lite: (0.1 * 0.707 * ln 40 + 1)^2 / sqrt(192)."""
    assert attention_scale(192, 40.0, 0.707) == pytest.approx(0.1147213867929261, abs=1e-7)
    assert attention_scale(192) == attention_scale(192, 1.0, 0.707) == attention_scale(192, 40.0) == 192**-0.5


def made(neighbours, sizes=SIZES):
    """A layer over dummy weights, its products as matrices, and the context that it is declared to."""
    cpu = torch.device("cpu")
    products = []
    backend = SimpleNamespace(device=cpu, layer_ops=ops, pack_linear=lambda weight, bias=None: products.append(weight))
    ctx = ModelContext(backend, DummySource(torch.float32, cpu, 0), torch.float32, cpu, 32)
    rotary = Rotary(ctx, read_rope({}), sizes.rope_dim)
    layer = LatentAttention(ctx, "attn", sizes, rotary=rotary, scale=0.5, bias=False, neighbours=neighbours)
    return layer, products, ctx


def test_rows_that_rotate_are_read_into_halves_and_all_others_stay():
    _, (kept, _), _ = made(neighbours=False)
    _, (moved, _), _ = made(neighbours=True)
    halves = [0, 2, 1, 3]
    heads = [[9 * head + i for i in [0, 1, 2, 3, 4, *(5 + j for j in halves)]] for head in range(2)]
    latent = [18 + i for i in [0, 1, 2, 3, 4, 5, *(6 + j for j in halves)]]
    assert torch.equal(moved, kept[[*heads[0], *heads[1], *latent]])


def test_each_head_expands_keys_and_values_by_rows_of_its_own():
    layer, _, ctx = made(neighbours=True)
    rows = ctx.weights.take("attn.kv_b_proj.weight", (16, 6))
    assert torch.equal(layer.up.keys[1], rows[8:13]) and torch.equal(layer.up.values[1], rows[13:16])
    assert layer.up.keys.is_contiguous() and layer.up.values.is_contiguous()


def test_a_layer_is_declared_with_one_key_of_which_the_first_part_is_its_value():
    _, _, ctx = made(neighbours=True)
    (spec,) = ctx.layers
    assert (spec.group, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == ("latent", 2, 1, 10, 6)
    assert (spec.scale, spec.window, spec.softcap, spec.sinks) == (0.5, None, None, None)
