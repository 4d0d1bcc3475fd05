"""Random bits inside a kernel are those of `framework.rng`, and the noise is as exact as float32 can be."""

import numpy as np
import torch
import triton
import triton.language as tl

from framework.rng import gumbel_np, random_bits, row_key
from framework_backends.triton.noise import bits, gumbel_noise


@triton.jit
def bits_kernel(seeds, positions, last, ids, out, COUNT: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, COUNT)
    found = bits(tl.load(seeds + row), tl.load(positions + row), tl.load(last), tl.load(ids + at))
    tl.store(out + row * COUNT + at, found.to(tl.int64))


@triton.jit
def noise_kernel(random, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, gumbel_noise(tl.load(random + at).to(tl.uint32)))


def test_bits_are_those_of_the_contract(device):
    seeds = [0, 1, -1, 2**62 + 12345, -(2**63)]
    positions = [0, 7, 4095, 2**31 + 3, 2**33]
    ids = torch.tensor([0, 1, 127, 128, 151935, 2**31 - 1, 77, 1000], dtype=torch.int32, device=device)
    out = torch.empty(5, 8, dtype=torch.int64, device=device)
    seeds_dev, positions_dev = torch.tensor(seeds, device=device), torch.tensor(positions, device=device)
    for stream, level in ((0, 0), (0, 1), (16, 1)):
        last = torch.tensor([stream * 2 + level], dtype=torch.int32, device=device)
        bits_kernel[(5,)](seeds_dev, positions_dev, last, ids, out, COUNT=8)
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            expected = [random_bits(row_key(seed, position, stream, level), int(i)) for i in ids]
            assert out[row].tolist() == expected


def test_noise_is_the_reference_within_rounding(device):
    edges = [0, 1, 2, 2**23, 2**24 - 1, 2**24, 2**27 - 1, 2**27, 2**31, 2**32 - 2, 2**32 - 1]
    generator = np.random.default_rng(0)
    random = np.concatenate([edges, generator.integers(0, 2**32, 1013), 2 ** generator.uniform(0, 32, 1024)]).astype(
        np.int64
    )
    out = torch.empty(2048, device=device)
    noise_kernel[(1,)](torch.from_numpy(random).to(device), out, COUNT=2048)
    error = np.abs(out.cpu().numpy() - gumbel_np(random))
    assert error.max() < 3e-6, (error.max(), random[error.argmax()])
