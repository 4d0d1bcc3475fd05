"""Packed products: equal to torch's, refused aloud where they are not, and row-invariant on request."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import ConfigError
from framework_backends import cpu_linear
from framework_backends.cpu_linear import LinearPacker, PackedLinear, PlainLinear, RowInvariantLinear

ROW_COUNTS = (1, 2, 3, 7, 8, 16, 33, 64, 300)
SHAPES = ((96, 64), (100, 52), (576, 1536), (960, 576))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
any_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_and_input(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = shape[1] ** -0.5
    return normal(*shape, dtype=dtype) * scale, normal(max(ROW_COUNTS), shape[1], dtype=dtype, seed=1)


@any_dtype
@any_shape
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
@pytest.mark.parametrize("with_bias", (False, True), ids=("", "bias"))
def test_product_equals_the_float64_one(
    shape: tuple[int, int], dtype: torch.dtype, invariant: bool, with_bias: bool
) -> None:
    weight, x = weight_and_input(shape, dtype)
    bias = normal(shape[0], dtype=dtype, seed=2) if with_bias else None
    product = LinearPacker(invariant).pack(weight, bias)
    expected = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    for rows in (0, 1, 5, 33, 300):
        out = product(x[:rows])
        assert out.dtype == dtype and out.shape == (rows, shape[0])
        torch.testing.assert_close(out.double(), expected[:rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@any_dtype
@any_shape
def test_invariant_product_gives_a_row_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = weight_and_input(shape, dtype)
    product = LinearPacker(batch_invariant=True).pack(weight, None)
    whole = product(x)
    for rows in ROW_COUNTS:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rows))[:rows]
        assert torch.equal(product(x[order]), whole[order])


def test_plain_float32_product_is_not_invariant_so_the_check_above_can_fail() -> None:
    weight, x = weight_and_input((576, 1536), torch.float32)
    whole = PlainLinear(weight, None)(x)
    assert not all(torch.equal(PlainLinear(weight, None)(x[:rows]), whole[:rows]) for rows in ROW_COUNTS)


def needs_four_rows(x: Tensor) -> Tensor:
    return x.clone() if len(x) % 4 == 0 else x + 1


def differs_at_one_row_alone(x: Tensor) -> Tensor:
    """As a product that has a form of its own for vectors, which rounds a few rows otherwise."""
    return x + (x[:, :1] > 1.5) if len(x) == 1 else x.clone()


def depends_on_places(x: Tensor) -> Tensor:
    """As one whose blocks are cut by the number of rows."""
    return x + torch.arange(len(x)).unsqueeze(1) // 16


@pytest.mark.parametrize(
    "product, form",
    [(needs_four_rows, (4, 256)), (differs_at_one_row_alone, (4, 256)), (depends_on_places, (16, 16))],
)
def test_form_is_found_by_measurement(product: Callable[[Tensor], Tensor], form: tuple[int, int]) -> None:
    assert cpu_linear.invariant_form(product, torch.zeros(8, 8)) == form


def test_products_that_no_padding_makes_invariant_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.batch_invariant=true: products of torch\.float32.*engine\.dtype"):
        cpu_linear.invariant_form(lambda x: x + torch.rand(1), torch.zeros(8, 8))


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch was built without oneDNN")
def test_weights_are_packed_where_torch_can() -> None:
    weight = normal(96, 64, dtype=torch.float32)
    assert isinstance(LinearPacker(False).pack(weight, None), PackedLinear)


def test_absent_private_operation_is_said_aloud_and_the_product_stays_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(*args: object) -> None:
        raise AttributeError("no such operation")

    monkeypatch.setattr(PackedLinear, "__init__", absent)
    weight, x = weight_and_input((96, 64), torch.float32)
    packer = LinearPacker(False)
    with caplog.at_level(logging.WARNING):
        products = [packer.pack(weight, None) for _ in range(3)]
    assert [message for message in caplog.messages if "using slower unpacked ones" in message] == caplog.messages
    assert len(caplog.messages) == 1, "one warning a weight shape"
    assert torch.equal(products[0](x), functional.linear(x, weight))


def test_wrong_packed_product_is_not_trusted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: torch.zeros(len(x), 96))
    weight, x = weight_and_input((96, 64), torch.float32)
    with caplog.at_level(logging.WARNING):
        product = LinearPacker(False).pack(weight, None)
    assert "differ from torch's" in caplog.text
    assert torch.equal(product(x), functional.linear(x, weight))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("invariant", (False, True), ids=("fast", "invariant"))
def test_weight_that_holds_what_is_no_number_is_packed_like_any_other(
    dtype: torch.dtype, invariant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(24, 32).to(dtype)
    weight[3, 5] = float("nan")
    out = LinearPacker(invariant).pack(weight, None)(torch.ones(2, 32).to(dtype))
    assert out[:, 3].isnan().all() and out[:, 4:].isfinite().all()
    assert not caplog.records


def test_products_of_many_rows_are_cut_in_invariant_mode() -> None:
    sizes: list[int] = []

    class Recorded(PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return super().__call__(x)

    product = RowInvariantLinear(Recorded(torch.randn(8, 16), None), 4, 256)
    assert product(torch.randn(600, 16)).shape == (600, 8)
    assert sizes == [256, 256, 88]
