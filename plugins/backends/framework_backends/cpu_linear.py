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
MAX_ROWS = 256
_FORMS = ((1, MAX_ROWS), (4, MAX_ROWS), (8, MAX_ROWS), (16, MAX_ROWS), (64, MAX_ROWS), (64, 64), (16, 16))
"""Of products in invariant mode: the number of rows is padded to a multiple of the first, and as many as the second are
multiplied at once. The last ones have one number of rows, whatever comes: processors with tiles (AMX) need that, where
the sums of a row depend on its place as well."""
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64, 100, 129)
_PROBED = 1 << 22
"""Results of a product that is probed: rows of large weights are fewer, since each row shows thousands of sums."""


class LinearPacker:
    """Packs weights; remembers which shapes it has probed."""

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self._trusted: dict[tuple[torch.dtype, torch.Size], bool] = {}
        self._forms: dict[tuple[torch.dtype, torch.Size, bool], tuple[int, int]] = {}

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
        if key not in self._forms:
            probe = _probe_weight(weight.dtype, weight.shape)
            self._forms[key] = invariant_form(type(product)(probe, None), probe)
        return RowInvariantLinear(product, *self._forms[key])


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
    """A product whose rows do not depend on their number or places: padded to a multiple of `pad`, at most `most` at
    once."""

    __slots__ = ("_most", "_pad", "_product")

    def __init__(self, product: Linear, pad: int, most: int) -> None:
        self._product, self._pad, self._most = product, pad, most

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > self._most:
            return torch.cat([self(part) for part in x.split(self._most)])
        return _padded(self._product, x, self._pad)


def invariant_form(product: Linear, weight: Tensor) -> tuple[int, int]:
    """(row multiple, most rows at once), the first of `_FORMS` for which a row's bits depend neither on the number of
    rows nor on its place, measured on this machine. Raises ConfigError when none is good enough.
    """
    x = _probe_input(weight, min(MAX_ROWS, max(32, _PROBED // len(weight))))
    # with tiles of 16 bits a few sums depend on their place, too rarely for a probe: only one number of rows is sound
    has_tiles = weight.dtype.itemsize == 2 and torch.cpu._is_amx_tile_supported()
    for pad, most in _FORMS[-2:] if has_tiles else _FORMS:
        if _rows_agree(RowInvariantLinear(product, pad, most), x):
            return pad, most
    raise ConfigError(
        f"engine.batch_invariant=true: products of {weight.dtype} with a weight of {tuple(weight.shape)} differ with "
        f"the number of rows on this CPU, also when there are always {_FORMS[-1][0]}. Change engine.dtype or set "
        f"engine.batch_invariant=false."
    )


def _rows_agree(product: Linear, x: Tensor) -> bool:
    """Whether each row of x has the bits that it has in the whole, in any company and at other places."""
    whole = product(x)
    for count in _COUNTS:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(count))
        if not all(torch.equal(product(x[rows]), whole[rows]) for rows in order.split(count)):
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
