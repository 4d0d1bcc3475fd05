"""The torch reference of the layer operations, against their formulas in float64."""

import pytest
import torch

from framework.layers import ops


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_rms_norm_divides_by_the_root_mean_square_and_multiplies_by_the_weight():
    x, weight = normal(3, 4, 6), normal(6)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-3).double(), expected, atol=1e-6, rtol=1e-6)


def test_rms_norm_in_bfloat16_counts_the_mean_in_float32():
    x = torch.full((1, 512), 3.0, dtype=torch.bfloat16)
    # A bfloat16 sum of 512 nines would stall at 2048, far below 4608, and give about 1.5.
    assert torch.equal(ops.rms_norm(x, torch.ones(512, dtype=torch.bfloat16), 0.0), torch.ones_like(x))


def test_add_rms_norm_gives_norm_and_sum_and_leaves_its_arguments_alone():
    x, residual, weight = normal(5, 8), normal(5, 8) * 2, normal(8)
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_silu_and_mul_gates_the_second_half_with_the_first():
    x = normal(4, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    torch.testing.assert_close(ops.silu_and_mul(x).double(), gate * gate.sigmoid() * up, atol=1e-6, rtol=1e-6)


def test_a_float32_weight_multiplies_before_the_only_rounding():
    x, weight = normal(3, 64, dtype=torch.bfloat16), normal(64)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


def test_gelu_tanh_is_its_formula_and_gates():
    x = normal(4, 10)
    wide = x.double()
    expected = wide / 2 * (1 + ((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)).tanh())
    torch.testing.assert_close(ops.gelu_tanh(x).double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ops.gelu_tanh_and_mul(x).double(), expected[:, :5] * wide[:, 5:], atol=1e-6, rtol=1e-6)


def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    x, weight, bias = normal(3, 6) + 2, normal(6), normal(6) - 1
    wide = x.double() - x.double().mean(-1, keepdim=True)
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() + bias.double()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-3).double(), expected, atol=1e-6, rtol=1e-6)


def test_soft_cap_bounds_and_keeps_small_values():
    x = torch.tensor([[1e-3, -40.0, 1e4]])
    found = ops.soft_cap(x, 30.0)
    torch.testing.assert_close(found.double(), 30 * (x.double() / 30).tanh(), atol=2e-6, rtol=1e-6)
    assert found[0, 2] == 30.0 and x[0, 2] == 1e4


def test_rotate_turns_each_pair_by_its_angle():
    x, angles = normal(3, 2, 8), normal(3, 1, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    turn = torch.polar(torch.ones(3, 1, 4, dtype=torch.float64), angles.double())
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double()) * turn
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(ops.rotate(x, cos, sin).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_keep_the_dtype_and_take_views(dtype):
    fused = normal(6, 5, 8, dtype=dtype)
    q, cos, sin = fused[:, :3], normal(6, 1, 8).cos(), normal(6, 1, 8).sin()
    found, whole = ops.rotate(q, cos, sin), ops.rotate(q.contiguous(), cos, sin)
    assert found.dtype == dtype and torch.equal(found, whole)
    weight = torch.ones(8, dtype=dtype)
    assert torch.equal(ops.rms_norm(q, weight, 1e-5), ops.rms_norm(q.contiguous(), weight, 1e-5))
