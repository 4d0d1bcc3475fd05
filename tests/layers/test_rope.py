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
        (
            {"rope_type": "proportional"},
            r"config.json: rope_type 'proportional' .* default, dynamic, linear, llama3, longrope, yarn. U",
        ),
        ({"rope_type": "yarm"}, r"Did you mean 'yarn'\?"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"does not know mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 3}, r"does not know attention_factor"),
        ({"full_attention": {"rope_type": "default"}}, r"a layer type \(full_attention\) are not known to this"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            r"partial_rotary_factor=0.5 is not known to this",
        ),
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


def test_partial_rotation_turns_whole_pairs():
    def read(factor, head_dim=8):
        rope = read_rope({"rope_parameters": {"partial_rotary_factor": factor}}, is_partial=True)
        return rope.rotary_dim(head_dim)

    assert read(0.5) == 4 and read(1.0) == 8
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor=0.4 rotates 3 of head_dim=8 dimensions"):
        read(0.4)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor must be at most 1, got 1.5"):
        read(1.5)


def test_parameters_of_a_layer_type_are_its_own_and_a_missing_one_is_named():
    config = {"rope_parameters": {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 9.0}}}
    assert read_rope(config, layer_type="sliding_attention").theta == 9.0
    with pytest.raises(CheckpointError, match="says nothing of chunked_attention, only of full_attention, sliding"):
        read_rope(config, layer_type="chunked_attention")


def test_longrope_needs_a_factor_for_each_frequency():
    rope = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0]}
    config = {"max_position_embeddings": 8, "original_max_position_embeddings": 4, "rope_parameters": rope}
    assert rotary(config, max_model_len=4).table.shape == (4, 2, 4)
    with pytest.raises(CheckpointError, match=r"rope_parameters.long_factor must hold 2 numbers, got \[1.0\]"):
        rotary(config, max_model_len=5)


def test_dynamic_is_refused_beyond_the_checkpoints_own_length():
    config = {"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert rotary(config, max_model_len=8).table.shape == (8, 2, 4)
    with pytest.raises(CheckpointError, match="max_position_embeddings=8, but max_model_len is 9"):
        rotary(config, max_model_len=9)
