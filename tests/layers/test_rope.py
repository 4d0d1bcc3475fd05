"""Which rotary configs are read, which are refused and in what words. Values are compared in tests/models."""

from types import SimpleNamespace

import pytest
import torch

from framework.errors import CheckpointError
from framework.layers.rope import Rotary, read_rope


def rotary(config, max_model_len=8, head_dim=4):
    ctx = SimpleNamespace(max_model_len=max_model_len, device=torch.device("cpu"))
    return Rotary(ctx, read_rope(config), head_dim)


def test_rotary_looks_up_the_cosine_of_position_times_frequency():
    cos, sin = rotary({"rope_theta": 100.0})(torch.tensor([0, 7, 3]))
    angles = torch.tensor([0.0, 7.0, 3.0])[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(cos[:, 0], torch.cat((angles, angles), -1).cos())
    torch.testing.assert_close(sin[:, 0], torch.cat((-angles, angles), -1).sin())


def test_factors_divide_one_frequency_each():
    rope = {"rope_type": "factors", "rope_theta": 100.0, "factors": [1.0, 4.0]}
    cos, _ = rotary({"rope_parameters": rope})(torch.tensor([5]))
    torch.testing.assert_close(cos[0, 0, :2], torch.tensor([5.0, 5.0 * 0.1 / 4]).cos())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, r"config.json: rope_type 'longrope' .* default, dynamic, linear, llama3, yarn. U"),
        ({"rope_type": "yarm"}, r"Did you mean 'yarn'\?"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"does not know mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 3}, r"does not know attention_factor"),
        ({"full_attention": {"rope_type": "default"}}, r"a layer type \(full_attention\) are not built yet"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5 is not built yet"),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope, message):
    with pytest.raises(CheckpointError, match=message):
        read_rope({"rope_parameters": rope})


def test_a_missing_or_broken_number_is_named():
    with pytest.raises(CheckpointError, match="rope_type 'linear' needs 'factor'"):
        rotary({"rope_scaling": {"type": "linear"}})
    with pytest.raises(CheckpointError, match=r"rope_parameters.factor must be a finite number above 0, got 'two'"):
        rotary({"rope_scaling": {"type": "linear", "factor": "two"}})


def test_dynamic_is_refused_beyond_the_checkpoints_own_length():
    config = {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert rotary(config, max_model_len=8).table.shape == (8, 2, 4)
    with pytest.raises(CheckpointError, match="max_position_embeddings=8, but max_model_len is 9"):
        rotary(config, max_model_len=9)
