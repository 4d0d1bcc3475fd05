"""Products of a float32 weight with rows of 16 bits against torch's of the rows in float32."""

import pytest
import torch
from torch.nn import functional

from framework.interfaces import Widens, WidensNormed
from framework_backends import cuda_linear
from framework_backends.cuda_linear import FEW_WIDE, SOME, CudaLinearPacker, choose_wide_tiles, most_wide_rows
from framework_backends.triton import norms

from .comparing import DTYPES, normal, within

close = within({torch.float32: 1e-5})  # what is multiplied is exact: the order of sums alone differs
SMALL, REAL = [(6, 40), (5, 520)], [(128, 2048), (64, 2048), (256, 7168), (33, 2880)]


def routers(device, invariant):
    """(weight, bias, product), with a bias and without."""
    packer = CudaLinearPacker(invariant)
    for outputs, columns in SMALL if device.type == "cpu" else REAL:
        weight = normal((outputs, columns), torch.float32, device) * columns**-0.5
        for bias in (None, normal((outputs,), torch.float32, device, seed=1)):
            yield weight, bias, packer.pack(weight, bias)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 13, SOME + 1])
@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_widened_product_equals_that_of_float32(device, dtype, invariant, num_rows):
    for weight, bias, product in routers(device, invariant):
        x = normal((num_rows, weight.shape[1] + 8), dtype, device, seed=2)[:, : weight.shape[1]]
        assert isinstance(product, Widens)
        close(product.widened(x), functional.linear(x.float(), weight, bias))


def test_an_invariant_widened_product_gives_a_row_the_same_bits_in_any_batch(device):
    for weight, _, product in routers(device, True):
        x = normal((SOME + 20, weight.shape[1]), torch.bfloat16, device, seed=2)
        whole = product.widened(x)
        for begin, end in ((0, 1), (5, 7), (3, 20), (5, SOME + 6)):
            assert torch.equal(product.widened(x[begin:end]), whole[begin:end])


def composed(product, x, residual, factor):
    """The norm, and the product behind it, in launches of their own."""
    if residual is None:
        normed, stream = norms.rms_norm(x, factor, 1e-6), x
    else:
        normed, stream = norms.add_rms_norm(x, residual, factor, 1e-6, in_place=False)
    return product.widened(normed), normed, stream


@pytest.mark.parametrize("has_residual", [False, True], ids=["stream", "residual"])
@pytest.mark.parametrize("num_rows", [0, 1, 3, FEW_WIDE, FEW_WIDE + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_that_is_taken_along_leaves_every_bit_as_it_was(device, dtype, num_rows, has_residual):
    for weight, _, product in routers(device, invariant=False):
        columns = weight.shape[1]
        x = normal((num_rows, columns + 8), dtype, device, seed=2)[:, :columns] * 3
        residual = normal((num_rows, columns), dtype, device, seed=3) if has_residual else None
        factor = normal((columns,), dtype, device, seed=4)
        expected = composed(product, x, residual, factor)
        found = product.widened_after_norm(x.clone(), None if residual is None else residual.clone(), factor, 1e-6)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_norm_is_taken_along_by_a_few_rows_of_16_bits_up_to_2048_columns(device, monkeypatch):
    taken = []
    kernel = cuda_linear.normed_wide_product
    monkeypatch.setattr(cuda_linear, "normed_wide_product", lambda *args, **words: taken.append(len(args[0])) or kernel(
        *args, **words))  # fmt: skip
    for columns, dtype in ((2048, torch.float16), (2056, torch.float16), (2048, torch.float32)):
        product = CudaLinearPacker(False).pack(normal((3, columns), torch.float32, device), None)
        for num_rows in (FEW_WIDE, FEW_WIDE + 1):
            x, factor = normal((num_rows, columns), dtype, device), normal((columns,), dtype, device, seed=1)
            found = product.widened_after_norm(x, None, factor, 1e-6)
            assert torch.equal(found[0], composed(product, x, None, factor)[0])
    assert taken == [FEW_WIDE]


def test_products_that_do_not_depend_on_the_batch_take_no_norm_along():
    weight = torch.zeros(4, 16)
    packed = [CudaLinearPacker(invariant).pack(weight, None) for invariant in (False, True)]
    assert [isinstance(one, WidensNormed) for one in packed] == [True, False]


def test_routers_that_are_large_leave_many_rows_to_the_library():
    assert [most_wide_rows(*one) for one in REAL] == [256, 512, SOME, 512]


def test_tiles_follow_the_number_of_rows():
    assert [choose_wide_tiles(rows, 2048).rows for rows in (1, 4, 5, SOME, SOME + 1)] == [1, 1, 8, 8, 8]
    assert choose_wide_tiles(SOME + 1, 2048) != choose_wide_tiles(SOME, 2048)


@pytest.mark.cuda
def test_rows_up_to_the_most_and_beyond_equal_those_of_float32():
    for weight, bias, product in routers(torch.device("cuda"), invariant=False):
        most = most_wide_rows(*weight.shape)
        for num_rows in (most, most + 1):
            x = normal((num_rows, weight.shape[1]), torch.bfloat16, weight.device, seed=2)
            close(product.widened(x), functional.linear(x.float(), weight, bias))
