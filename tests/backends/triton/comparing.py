"""Random tensors for kernels, and how near their results must come to the reference."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def within(tolerances):
    """A comparison of equal dtypes, absolute and relative, by the tolerance of each dtype."""

    def close(actual, expected):
        assert actual.dtype == expected.dtype
        tolerance = tolerances[expected.dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    return close
