"""cos and sin of every rope type against the functions of transformers, at positions up to 100,000."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from framework.layers.rope import Rotary, read_rope

LENGTH = 100_001
POSITIONS = torch.tensor([0, 1, 2, 777, 4096, 50_001, 99_999, 100_000])
CONFIG = {
    "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 131_072,
}  # fmt: skip
FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(32)],
    "long_factor": [1.0 + 0.9 * i for i in range(32)],
}
ROPES = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "yarn_with_every_key": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2,
        "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False, "rope_theta": 150_000.0,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS},
    "longrope_factor": {"rope_type": "longrope", "factor": 5.0, "original_max_position_embeddings": 4096, **FACTORS},
    "longrope_attention_factor": {
        "rope_type": "longrope", "attention_factor": 1.3, "original_max_position_embeddings": 4096, **FACTORS,
    },
}  # fmt: skip


def theirs(rope, length, partial=1.0):
    """cos, sin [positions, rotated / 2] of transformers."""
    config = LlamaConfig(**CONFIG, rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": partial, **rope})
    kind = rope["rope_type"]
    if kind == "default":
        inv, scale = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        # of a sequence that fills the length; dynamic is served within the checkpoint's own
        inv, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = POSITIONS[length > POSITIONS].float()[:, None] * inv
    return angles.cos() * scale, angles.sin() * scale


def mine(rope, length, partial=1.0):
    ctx = SimpleNamespace(max_model_len=length, device=torch.device("cpu"))
    config = {**CONFIG, "partial_rotary_factor": partial, "rope_parameters": {"rope_theta": 10_000.0, **rope}}
    cos, sin = Rotary(ctx, read_rope(config, is_partial=True), 64)(POSITIONS[length > POSITIONS])
    return cos[:, 0], sin[:, 0]


@pytest.mark.parametrize("name", ROPES)
def test_cosines_equal_transformers_at_positions_up_to_100k(name):
    cos, sin = mine(ROPES[name], LENGTH)
    for found, expected in zip((cos[:, :32], sin[:, 32:]), theirs(ROPES[name], LENGTH), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_longrope_takes_its_short_factors_up_to_the_original_length():
    for found, expected in zip(mine(ROPES["longrope"], 4096), theirs(ROPES["longrope"], 4096), strict=True):
        torch.testing.assert_close(found[:, :32].abs(), expected.abs(), atol=1e-6, rtol=0)
    short, long = mine(ROPES["longrope"], 4096)[0], mine(ROPES["longrope"], 4097)[0]
    assert not torch.allclose(short, long[: len(short)])


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_partial_rotation_has_the_frequencies_of_its_part_and_leaves_the_rest(name):
    cos, sin = mine(ROPES[name], LENGTH, partial=0.25)
    expected_cos, expected_sin = theirs(ROPES[name], LENGTH, partial=0.25)
    torch.testing.assert_close(cos[:, :8], expected_cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 32:40], expected_sin, atol=1e-6, rtol=0)
    passed = torch.cat((cos[:, 8:32], cos[:, 40:])), torch.cat((sin[:, 8:32], sin[:, 40:]))
    assert torch.equal(passed[0], torch.ones_like(passed[0])) and not passed[1].any()
