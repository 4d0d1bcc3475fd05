"""MXFP4 against a table of every code and against transformers' own conversion."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from framework.errors import CheckpointError
from framework.layers.mxfp4 import dequantize, take_mxfp4
from framework_loaders.source import ShapedSource

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_bytes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(len(shape)))


def test_every_code_has_its_value_and_the_low_half_comes_first():
    blocks = torch.tensor([[16 * (15 - i) + i for i in range(16)]], dtype=torch.uint8)
    values = MAGNITUDES + [-m for m in MAGNITUDES]
    expected = torch.tensor([v for i in range(16) for v in (values[i], values[15 - i])])
    assert torch.equal(dequantize(blocks, torch.tensor([127], dtype=torch.uint8)), expected)


@pytest.mark.parametrize("scale", [0, 1, 100, 126, 128, 200, 250])
def test_scales_are_powers_of_two(scale):
    blocks = torch.full((1, 16), 0x25, dtype=torch.uint8)  # 3 and 1
    found = dequantize(blocks, torch.tensor([scale], dtype=torch.uint8))
    assert torch.equal(found.double(), torch.tensor([3.0, 1.0] * 16).double() * 2.0 ** (scale - 127))


def test_scale_255_is_no_number_and_harms_no_other_block():
    found = dequantize(torch.zeros(2, 16, dtype=torch.uint8), torch.tensor([255, 127], dtype=torch.uint8))
    assert found[:32].isnan().all() and (found[32:] == 0).all()


def test_values_are_those_of_transformers_bit_for_bit():
    blocks, scales = random_bytes(3, 6, 2, 16), random_bytes(3, 6, 2, low=90, high=150)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales).bfloat16(), expected)


class Source(ShapedSource):
    def __init__(self, tensors):
        super().__init__("file", {k: tuple(v.shape) for k, v in tensors.items()}, torch.float32, torch.device("cpu"))
        self._tensors = tensors

    def _read(self, name, dtype):
        assert dtype == torch.uint8
        return self._tensors[name]


def test_blocks_and_scales_of_a_checkpoint_become_one_tensor_of_the_models_dtype():
    blocks, scales = random_bytes(3, 6, 2, 16), random_bytes(3, 6, 2, low=120, high=130)
    ctx = SimpleNamespace(weights=Source({"w_blocks": blocks, "w_scales": scales}), dtype=torch.bfloat16)
    ctx.device = torch.device("cpu")
    found = take_mxfp4(ctx, "w", (3, 6, 64))
    assert found.dtype == torch.bfloat16 and torch.equal(found, dequantize(blocks, scales).bfloat16())
    with pytest.raises(CheckpointError, match=r"'w_blocks' has shape \[3, 6, 2, 16\], .* asks for \[3, 6, 3, 16\]"):
        take_mxfp4(ctx, "w", (3, 6, 96))
