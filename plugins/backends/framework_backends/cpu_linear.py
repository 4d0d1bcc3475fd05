"""Dense products on the CPU: weights packed once for oneDNN, checked against torch, and kept row-invariant on request.

The packed operations are private to torch, so each weight shape is probed before it is trusted; where they are absent
or wrong a warning says so and the product is `torch.nn.functional.linear`. Called by `cpu.CpuBackend.pack_linear`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import ConfigError
from framework.interfaces import Linear

log = logging.getLogger(__name__)

# Rows a step typically has; oneDNN chooses the packed layout by it. Layouts for 1 and 256 rows were no faster at any
# size in bfloat16, and slower in float32.
_TYPICAL_ROWS = 32
_PACKED_DTYPES = (torch.bfloat16, torch.float32)
_PADS = (1, 4, 8, 16)
MAX_ROWS = 256
"""Rows of one product in invariant mode: no number of rows is used that the probe has not bounded."""


class LinearPacker:
    """Packs weights; remembers which shapes it has probed."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self._trusted: dict[tuple[torch.dtype, torch.Size], bool] = {}
        self._pads: dict[tuple[torch.dtype, torch.Size, bool], int] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A product [T, in] -> [T, out] of weight [out, in]. ConfigError when it cannot be made row-invariant."""
        key = (weight.dtype, weight.shape)
        packed = self._packed(weight, bias) if self._trusted.get(key, True) else None
        self._trusted[key] = packed is not None
        product = PlainLinear(weight, bias) if packed is None else packed
        return self._invariant(product, weight) if self._batch_invariant else product

    def _packed(self, weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
        key = (weight.dtype, weight.shape)
        if weight.dtype not in _PACKED_DTYPES:
            return None
        try:
            product = PackedLinear(weight, bias)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            log.warning("this torch cannot pack %s products (%s): using slower unpacked ones", weight.dtype, error)
            return None
        if key not in self._trusted:
            self._trusted[key] = _agrees_with_torch(*key)
            if not self._trusted[key]:
                log.warning(
                    "packed products of %s differ from torch's: using slower unpacked ones", tuple(weight.shape)
                )
        return product if self._trusted[key] else None

    def _invariant(self, product: PackedLinear | PlainLinear, weight: Tensor) -> Linear:
        key = (weight.dtype, weight.shape, isinstance(product, PackedLinear))
        if key not in self._pads:
            probe = _probe_weight(weight.dtype, weight.shape)
            self._pads[key] = row_padding(type(product)(probe, None), probe)
        return RowInvariantLinear(product, self._pads[key])


class PlainLinear:
    """`functional.linear` with its weight."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A oneDNN product with a weight in oneDNN's own layout. Raises what torch raises where that does not exist."""

    __slots__ = ("_bias", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._weight, self._bias, "none", [], "")


class RowInvariantLinear:
    """A product whose rows do not depend on their number: padded to a multiple of `pad`, at most MAX_ROWS at once."""

    __slots__ = ("_pad", "_product")

    def __init__(self, product: Linear, pad: int) -> None:
        self._product, self._pad = product, pad

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > MAX_ROWS:
            return torch.cat([self(part) for part in x.split(MAX_ROWS)])
        return _padded(self._product, x, self._pad)


def row_padding(product: Linear, weight: Tensor) -> int:
    """The least row multiple for which a row's bits do not depend on the number of rows, measured on this machine.

    Raises ConfigError when no multiple is good enough.
    """
    x = _probe_input(weight, MAX_ROWS)
    for pad in _PADS:
        if _rows_agree(product, x, pad):
            return pad
    raise ConfigError(
        f"engine.batch_invariant=true: products of {weight.dtype} with a weight of {tuple(weight.shape)} differ with "
        f"the number of rows on this CPU, also when padded to {_PADS[-1]}. Change engine.dtype or set "
        f"engine.batch_invariant=false."
    )


def _rows_agree(product: Linear, x: Tensor, pad: int) -> bool:
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64, 100, 129):
        for begin in (0, 5):
            part = x[begin : begin + rows]
            if not torch.equal(_padded(product, part, pad), whole[begin : begin + rows]):
                return False
    return True


def _padded(product: Linear, x: Tensor, pad: int) -> Tensor:
    missing = -len(x) % pad
    return product(functional.pad(x, (0, 0, 0, missing)))[: len(x)] if missing else product(x)


def _agrees_with_torch(dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether packed products of this shape equal torch's, tried on a weight of random numbers.

    bfloat16 sums in float32 and rounds once, so bits are equal; float32 sums may be grouped otherwise. A checkpoint's
    own weight would not do: it may hold what is no number, which is no fault of the product.
    """
    weight = _probe_weight(dtype, shape)
    x = _probe_input(weight, 5)
    ours, theirs = PackedLinear(weight, None)(x), functional.linear(x, weight)
    if dtype == torch.bfloat16:
        return torch.equal(ours, theirs)
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def _probe_weight(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Random numbers of a prime period: drawing as many as a head has would take longer than all the rest."""
    period = torch.randn(65537, generator=torch.Generator().manual_seed(1)).to(dtype)
    return period.repeat(-(-shape.numel() // len(period)))[: shape.numel()].view(shape)


def _probe_input(weight: Tensor, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
