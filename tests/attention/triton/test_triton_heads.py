"""Parts of kernels that turn heads, each by itself."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from framework_attention.triton.heads import Turning, angles

DIM = 16


class Angles(NamedTuple):
    """cos, sin [n, DIM] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@triton.jit
def angles_kernel(turning, positions, out, COUNT: tl.constexpr, DIM: tl.constexpr):
    row = tl.arange(0, COUNT)[:, None]
    cos, sin = angles(turning, tl.load(positions + row), DIM, DIM)
    at = row * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out.cos + at, cos)
    tl.store(out.sin + at, sin)


def test_padding_rows_read_no_angles_in_front_of_the_table(device):
    memory = torch.randn(5, 2, DIM, device=device)
    table = memory[1:]
    positions = torch.tensor([-1, 0, 3, -1], dtype=torch.int32, device=device)
    out = Angles(*torch.full((2, 4, DIM), float("nan"), device=device))
    angles_kernel[(1,)](Turning(table, None, None, 0.0), positions, out, COUNT=4, DIM=DIM)
    assert torch.equal(torch.stack(out, 1), table[[0, 0, 3, 0]])
