"""Products of a float32 weight with rows of 16 bits against torch's of the rows in float32."""

import pytest
import torch
from torch.nn import functional

from framework.interfaces import Widens
from framework_backends.cuda_linear import SOME, CudaLinearPacker, choose_wide_tiles, most_wide_rows

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


def test_routers_that_are_large_leave_many_rows_to_the_library():
    assert [most_wide_rows(*one) for one in REAL] == [256, 512, SOME, 512]


def test_tiles_follow_the_number_of_rows():
    assert [choose_wide_tiles(rows).rows for rows in (1, 4, 5, SOME, SOME + 1)] == [1, 1, 8, 8, 8]
    assert choose_wide_tiles(SOME + 1) != choose_wide_tiles(SOME)


@pytest.mark.cuda
def test_rows_up_to_the_most_and_beyond_equal_those_of_float32():
    for weight, bias, product in routers(torch.device("cuda"), invariant=False):
        most = most_wide_rows(*weight.shape)
        for num_rows in (most, most + 1):
            x = normal((num_rows, weight.shape[1]), torch.bfloat16, weight.device, seed=2)
            close(product.widened(x), functional.linear(x.float(), weight, bias))
