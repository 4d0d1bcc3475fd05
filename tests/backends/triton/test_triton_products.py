"""Products of few rows, and of any number in one order, against torch and `framework.layers.ops`."""

import pytest
import torch
from torch.nn import functional

from framework.interfaces import FusesNorm, Gates
from framework.layers import ops as reference
from framework_backends.cuda_linear import (
    FEW,
    SOME,
    CudaLinear,
    CudaLinearPacker,
    FewTiles,
    InvariantLinear,
    RowTiles,
    SplitTiles,
    Tiles,
    choose_tiles,
)

from .comparing import DTYPES, normal, within

# Sums in float32, rounded once; behind a norm and a gate twice more. The interpreter cuts bfloat16 off where devices
# round it, an error of one unit, 2^-7, each time.
close = within({torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 4e-3})
# (weight rows, columns, tiles): pieces that fit and pieces that do not, one and several ahead, rows left over
ONE = RowTiles(4, 32, warps=1, ahead=2, in_turn=False)
SMALL = [
    (16, 64, Tiles(RowTiles(4, 64, 1, ahead=1), FewTiles(8, warps=2, blocks=1, ahead=1), SplitTiles(8, 32, 1, 2))),
    (26, 72, Tiles(ONE, FewTiles(16, warps=2, blocks=1, ahead=2), SplitTiles(8, 32, 3, 2))),
    (20, 200, Tiles(RowTiles(8, 64, warps=1, ahead=4), SplitTiles(8, 64, 2, 2), SplitTiles(16, 32, 5, 2))),
]
REAL = [(6144, 1024), (1024, 3072), (4096, 4096), (4608, 14336), (2056, 104), (6000, 2056)]


def products(device, dtype, bias):
    """(weight, bias, product) over the table; on a device with the tiles that are chosen there."""
    if device.type == "cpu":
        table = [(rows, columns, Tiles() if dtype == torch.float32 else tiles) for rows, columns, tiles in SMALL]
    else:
        table = [(rows, columns, choose_tiles(dtype, rows, columns)) for rows, columns in REAL]
    for rows, columns, tiles in table:
        weight = normal((rows, columns), dtype, device) * columns**-0.5
        add = normal((rows,), dtype, device, seed=1) if bias else None
        yield weight, add, CudaLinear(weight, add, tiles, dependent=device.type == "cuda")


@pytest.mark.parametrize("num_rows", [1, 3, FEW, FEW + 1, SOME + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_equals_that_of_torch(device, dtype, num_rows):
    for bias in (False, True):
        for weight, add, product in products(device, dtype, bias):
            x = normal((num_rows, weight.shape[1] + 8), dtype, device, seed=2)[:, : weight.shape[1]]
            expected = functional.linear(x, weight, add)
            close(product(x), expected)
            close(product.gated(x), gated(expected))


@pytest.mark.parametrize(
    ("num_rows", "has_residual"), [(1, True), (1, False), (3, True), (FEW + 1, True), (SOME + 1, False)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_behind_a_norm_equals_the_operations_one_after_the_other(device, dtype, num_rows, has_residual):
    for weight, add, product in products(device, dtype, True):
        x, residual = (normal((num_rows, weight.shape[1]), dtype, device, seed=seed) for seed in (2, 3))
        factor, before = normal((weight.shape[1],), dtype, device, seed=4), (x.clone(), residual.clone())
        given = residual if has_residual else None
        total = x + residual if has_residual else x
        expected = functional.linear(reference.rms_norm(total, factor, 1e-5), weight, add)
        for method, want in ((product.after_norm, expected), (product.gated_after_norm, gated(expected))):
            actual, stream = method(x, given, factor, 1e-5)
            close(actual, want)
            close(stream, total)
            assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def gated(product):
    return reference.silu_and_mul(product)


def test_a_single_row_behind_a_norm_is_one_launch(device, monkeypatch):
    def refuse(*args, **words):
        raise AssertionError("launched")

    weight, _, product = next(products(device, torch.float16, False))
    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(f"framework_backends.triton.norms.{name}", refuse)
    monkeypatch.setattr("framework_backends.triton.activations.silu_and_mul", refuse)
    x, factor = normal((2, weight.shape[1]), torch.float16, device), torch.ones_like(weight[0])
    product.gated_after_norm(x[:1], x[1:], factor, 1e-5)
    with pytest.raises(AssertionError, match="launched"):
        product.gated_after_norm(x, None, factor, 1e-5)


def test_sums_of_parts_are_added_in_one_order_every_time(device):
    for weight, _, product in products(device, torch.float16, False):
        x = normal((FEW + 1, weight.shape[1]), torch.float16, device, seed=2)
        first = product(x)
        assert all(torch.equal(product(x), first) for _ in range(1 if device.type == "cpu" else 50))


def test_no_rows_give_no_rows(device):
    for weight, _, product in products(device, torch.float16, False):
        x, factor = torch.empty(0, weight.shape[1], dtype=torch.float16, device=device), torch.ones_like(weight[0])
        assert product(x).shape == (0, weight.shape[0])
        assert product.gated_after_norm(x, x, factor, 1e-5)[0].shape == (0, weight.shape[0] // 2)


def test_the_packer_gives_products_that_take_a_norm_unless_they_are_invariant(device):
    weight = normal((16, 64), torch.float32, device)
    assert isinstance(CudaLinearPacker(False).pack(weight, None), FusesNorm)
    assert isinstance(CudaLinearPacker(False).pack(weight, None), Gates)
    assert not isinstance(CudaLinearPacker(True).pack(weight, None), FusesNorm)


def test_weights_that_no_tile_fits_are_multiplied_by_torch():
    assert choose_tiles(torch.bfloat16, 4096, 1024) != Tiles()
    assert choose_tiles(torch.float32, 4096, 1024) == Tiles()
    assert choose_tiles(torch.bfloat16, 4096, 1001) == Tiles()  # rows that begin between two vectors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_invariant_product_equals_that_of_torch(device, dtype):
    shapes = [(3, 40, 72), (70, 20, 96)] + ([(130, 6144, 1000), (64, 20000, 1024)] if device.type == "cuda" else [])
    for num_rows, rows, columns in shapes:
        weight, add = normal((rows, columns), dtype, device) * columns**-0.5, normal((rows,), dtype, device, seed=1)
        x = normal((num_rows, columns + 8), dtype, device, seed=2)[:, :columns]
        close(InvariantLinear(weight, add, dependent=device.type == "cuda")(x), functional.linear(x, weight, add))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_invariant_product_gives_a_row_the_same_bits_in_any_batch(device, dtype):
    sizes = [(40, 72)] if device.type == "cpu" else [(1536, 4096), (20000, 1024), (300, 104)]
    most, counts = (130, (1, 65)) if device.type == "cpu" else (2000, (1, 2, 16, 64, 65, 128, 300, 1024))
    for rows, columns in sizes:
        weight, x = normal((rows, columns), dtype, device), normal((most, columns), dtype, device, seed=1)
        product = InvariantLinear(weight, None, dependent=device.type == "cuda")
        whole = product(x)
        for count in counts:
            for begin in (0, 5):
                part = slice(begin, begin + count)
                assert torch.equal(product(x[part]), whole[part])
