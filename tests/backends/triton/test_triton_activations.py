"""Gate and rotation in Triton against `framework.layers.ops`."""

import pytest
import torch

from framework.layers import ops as reference
from framework_backends.triton import activations

from .comparing import DTYPES, normal, within

# Two roundings of the dtype; the interpreter cuts bfloat16 off where devices round it.
close = within({torch.float32: 2e-6, torch.bfloat16: 3.2e-2, torch.float16: 2e-3})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_equals_the_reference(device, dtype):
    shapes = [(2, 48), (1, 2 * 1100)] + ([(5, 28672), (1, 6144), (300, 6144)] if device.type == "cuda" else [])
    for rows, width in shapes:
        gate_up = normal((rows, width + 8), dtype, device)[:, :width] * 4
        gate_up[0, :2] = torch.tensor([-120.0, 120.0])  # exp of it is no float32
        close(activations.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_and_mul_equals_the_reference(device, dtype):
    shapes = [(2, 48), (1, 2 * 1100)] + ([(5, 28672), (300, 6144)] if device.type == "cuda" else [])
    for rows, width in shapes:
        gate_up = normal((rows, width + 8), dtype, device)[:, :width] * 4
        gate_up[0, :3] = torch.tensor([-120.0, 120.0, 0.0])
        close(activations.gelu_tanh_and_mul(gate_up), reference.gelu_tanh_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_equals_the_reference_in_the_memory_of_its_input(device, dtype):
    close_to_cap = within({torch.float32: 1e-5, torch.bfloat16: 3.2e-2, torch.float16: 2e-3})
    for shape in [(2, 1100)] + ([(5, 256000)] if device.type == "cuda" else []):
        x = normal(shape, dtype, device) * 40
        x[0, :4] = torch.tensor([0.0, 1e-3, -3e4, 3e4])
        expected, found = reference.soft_cap(x, 30.0), activations.soft_cap(x, 30.0)
        assert found is x
        close_to_cap(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_equals_the_reference_and_keeps_its_input(device, dtype):
    shapes = [(3, 9, 16), (2, 20, 24)] + ([(5, 40, 128), (300, 24, 64), (3, 7, 96)] if device.type == "cuda" else [])
    for tokens, heads, size in shapes:
        x, before = (normal((tokens, heads, size), dtype, device) for _ in range(2))
        cos, sin = normal((tokens, 2, size), torch.float32, device, seed=1).split(1, dim=1)
        part = x[:, 1:-2]  # queries and keys inside a fused product
        close(activations.rotate(part, cos, sin), reference.rotate(part, cos, sin))
        assert torch.equal(x, before)


def test_no_rows_are_no_launch(device):
    assert activations.silu_and_mul(torch.empty(0, 32, device=device)).shape == (0, 16)
    assert activations.soft_cap(torch.empty(0, 32, device=device), 1.0).shape == (0, 32)
    heads, cos = torch.empty(0, 2, 8, device=device), torch.empty(0, 1, 8, device=device)
    assert activations.rotate(heads, cos, cos).shape == (0, 2, 8)
