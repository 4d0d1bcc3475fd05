"""Norms in Triton against `framework.layers.ops`, for every width, stride and dtype that models pass."""

import pytest
import torch

from framework.layers import ops as reference
from framework_backends.cuda_layer_ops import CudaLayerOps
from framework_backends.triton import norms

from .comparing import DTYPES, normal, within

# Two roundings of the dtype, before and after the weight; the interpreter cuts bfloat16 off where devices round it.
close = within({torch.float32: 2e-6, torch.bfloat16: 3.2e-2, torch.float16: 2e-3})
# (shape, dimensions of heads that are left out): wide rows, widths that are no power of 2, several narrow rows
SMALL = [((3, 96), 0), ((1, 257), 0), ((5, 4, 16), 1), ((7,), 0)]
REAL = [((1, 1024), 0), ((16, 4096), 0), ((300, 4096), 0), ((9, 5120), 0), ((3, 14336), 0), ((33, 24, 128), 8)]


def tables(device):
    return SMALL if device.type == "cpu" else SMALL + REAL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_the_reference_and_keeps_its_input(device, dtype):
    for shape, left_out in tables(device):
        whole = normal(shape, dtype, device) * 30
        x = whole[:, left_out:] if left_out else whole
        weight, before = normal(shape[-1:], dtype, device, seed=1), whole.clone()
        close(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # the interpreter cuts bfloat16 off
def test_a_float32_weight_multiplies_before_the_only_rounding(device, dtype):
    x, weight = normal((3, 96), dtype, device) * 30, normal((96,), torch.float32, device, seed=1)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = norms.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    # half a unit in the last place of the result, and what float32 adds
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_equals_the_reference(device, dtype, in_place):
    for shape, left_out in tables(device):
        if len(shape) != 2 or left_out:
            continue
        x = normal((shape[0], shape[1] + 16), dtype, device)[:, : shape[1]]  # rows of a wider product
        residual, weight = normal(shape, dtype, device, seed=1), normal(shape[-1:], dtype, device, seed=2)
        expected, before = reference.add_rms_norm(x, residual, weight, 1e-6), residual.clone()
        actual = norms.add_rms_norm(x, residual, weight, 1e-6, in_place=in_place)
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
        assert (actual[1] is residual) is in_place
        assert in_place or torch.equal(residual, before)


def test_a_row_has_the_same_bits_in_any_batch(device):
    x, weight = normal((9, 96), torch.float16, device), normal((96,), torch.float16, device, seed=1)
    whole = norms.rms_norm(x, weight, 1e-6)
    for begin, end in ((0, 1), (4, 9)):
        assert torch.equal(norms.rms_norm(x[begin:end], weight, 1e-6), whole[begin:end])


@pytest.mark.parametrize("width", [63, 96])
def test_layer_norm_and_gelu_of_the_backend_give_a_row_the_same_bits_in_any_batch(device, width):
    ours, weight = CudaLayerOps(), normal((width,), torch.float16, device, seed=1)
    x = normal((9, width), torch.float16, device) * 3 + 1

    def results(rows):
        return ours.layer_norm(rows, weight, weight, 1e-5), ours.gelu_tanh(rows)

    for begin, end in ((0, 1), (4, 9)):
        for part, whole in zip(results(x[begin:end].clone()), results(x), strict=True):
            assert torch.equal(part, whole[begin:end])


def test_no_rows_are_no_launch(device):
    x = torch.empty(0, 32, device=device)
    assert norms.rms_norm(x, torch.ones(32, device=device), 1e-6).shape == (0, 32)
