"""Elementwise operations of the CPU backend against the torch reference of `framework.layers.ops`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from framework.layers import ops as reference
from framework_backends.cpu_layer_ops import CpuLayerOps, InvariantLayerOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One rounding more or less of the result's own dtype, two for the norm (before and after the weight).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ROW_COUNTS = (1, 2, 3, 7, 8, 16, 33, 100)
both = pytest.mark.parametrize("ops", (CpuLayerOps(), InvariantLayerOps()), ids=("fast", "invariant"))
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@both
@any_dtype
def test_rms_norm_equals_the_reference_and_keeps_its_input(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x, weight = normal(9, 52, dtype=dtype) * 30, normal(52, dtype=dtype, seed=1)
    before = x.clone()
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@both
@any_dtype
def test_norm_of_heads_in_a_fused_product_equals_the_reference(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    heads, weight = normal(5, 9, 16, dtype=dtype)[:, :6], normal(16, dtype=dtype, seed=1)
    close(ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@both
@any_dtype
def test_add_rms_norm_equals_the_reference(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((9, 52), (9, 52), (52,))))
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    for actual, wanted in zip(ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, strict=True):
        close(actual, wanted)


@both
@any_dtype
def test_silu_and_mul_equals_the_reference(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    gate_up = normal(9, 104, dtype=dtype) * 4
    gate_up[0, :2] = torch.tensor([-120.0, 120.0])
    close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@both
@any_dtype
def test_norm_with_a_float32_weight_is_rounded_once(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x, weight = normal(9, 52, dtype=dtype) * 30, normal(52, dtype=torch.float32, seed=1)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for rows in (slice(None), slice(1)):
        found = ops.rms_norm(x[rows], weight, 1e-5)
        assert found.dtype == dtype
        # half a unit in the last place of the result, and what float32 adds
        torch.testing.assert_close(found.double(), exact[rows], rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)
    close(ops.add_rms_norm(x.clone(), x.clone(), weight, 1e-5)[0], reference.add_rms_norm(x, x, weight, 1e-5)[0])


@both
@any_dtype
def test_gelu_equals_the_reference_with_and_without_a_gate(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x = normal(9, 104, dtype=dtype) * 4
    x[0, :4] = torch.tensor([-120.0, 120.0, 0.0, -3.0])
    before = x.clone()
    close(ops.gelu_tanh(x), reference.gelu_tanh(x))
    close(ops.gelu_tanh_and_mul(x), reference.gelu_tanh_and_mul(x))
    assert torch.equal(x, before)


@both
@any_dtype
def test_layer_norm_equals_the_reference(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x, weight, bias = normal(9, 52, dtype=dtype) * 9 + 3, normal(52, dtype=dtype, seed=1), normal(52, dtype=dtype)
    close(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))


@both
@any_dtype
def test_soft_cap_equals_the_reference(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    x = normal(4, 51, dtype=dtype) * 40
    expected = reference.soft_cap(x, 30.0)
    torch.testing.assert_close(ops.soft_cap(x, 30.0), expected, rtol=TOLERANCE[dtype], atol=1e-5)
    assert expected.abs().max() <= 30


@both
@any_dtype
def test_rotate_equals_the_reference_and_keeps_its_input(ops: CpuLayerOps, dtype: torch.dtype) -> None:
    heads, angles = normal(7, 8, 16, dtype=dtype), normal(7, 1, 16, dtype=torch.float32, seed=1)
    before = heads.clone()
    close(
        ops.rotate(heads[:, :6], angles.cos(), angles.sin()), reference.rotate(heads[:, :6], angles.cos(), angles.sin())
    )
    assert torch.equal(heads, before)


@any_dtype
@pytest.mark.parametrize("width", (51, 64, 1536))
def test_invariant_operations_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype, width: int) -> None:
    ops, rows = InvariantLayerOps(), max(ROW_COUNTS)
    x, weight = normal(rows, 2 * width, dtype=dtype), normal(2 * width, dtype=dtype, seed=1)
    heads, angles = normal(rows, 3, 2 * width, dtype=dtype), normal(rows, 1, 2 * width, dtype=torch.float32)

    def results(rows: slice) -> tuple[Tensor, ...]:
        rotated = ops.rotate(heads[rows, :2], angles[rows].cos(), angles[rows].sin())
        added = ops.add_rms_norm(x[rows].clone(), x[rows].clone(), weight, 1e-5)
        normed = [ops.rms_norm(x[rows], factor, 1e-5) for factor in (weight, weight.float())]
        gated = ops.silu_and_mul(x[rows]), ops.gelu_tanh_and_mul(x[rows]), ops.gelu_tanh(x[rows, :width])
        others = ops.layer_norm(x[rows], weight, weight, 1e-5), ops.soft_cap(x[rows, :width], 3.0)
        return *normed, *added, *gated, *others, rotated

    whole = results(slice(None))
    for begin in (0, 1, 5):
        for count in ROW_COUNTS:
            picked = slice(begin, begin + count)
            for part, all_rows in zip(results(picked), whole, strict=True):
                assert torch.equal(part, all_rows[picked])


def test_silu_of_torch_depends_on_the_place_so_the_check_above_can_fail() -> None:
    x = normal(4, 51, dtype=torch.float32)
    assert not all(torch.equal(functional.silu(row), functional.silu(x)[i]) for i, row in enumerate(x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("offset", (0.0, 30.0))
def test_the_norm_of_a_single_row_is_that_of_the_row_among_others(dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 576, generator=generator) + offset).to(dtype)
    weight = torch.rand(576, generator=generator).to(dtype)
    many, ops = CpuLayerOps().rms_norm(x, weight, 1e-5), CpuLayerOps()
    for row in range(3):
        alone = ops.rms_norm(x[row : row + 1], weight, 1e-5)
        # The mean square is summed in another order: some units of float32, one of bfloat16 after rounding.
        torch.testing.assert_close(alone, many[row : row + 1], rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-6)
