"""The part of the backends' contract suite that is about what layers ask for: products and elementwise functions, with
the protocols that a product may have beside them, against the torch reference. Called by `testing.backends`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from framework.interfaces import FusesNorm, Gates, Linear, Widens
from framework.layers import ops
from framework.testing.checking import Skipped
from framework.testing.tolerance import assert_near

if TYPE_CHECKING:
    from framework.interfaces import Backend
    from framework.testing.backend_case import BackendCase

OUT, IN = 24, 40
ROWS = (1, 3, 17)
EPS = 1e-6
PRODUCT, FUNCTION = 1e-3, 1e-4
"""How far results may be off in float32: 1e-5 of the size of a product's terms, and roundings in another order."""


def _random(backend: Backend, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(backend.device, backend.dtype)


def check_products(case: BackendCase) -> None:
    """[T, in] -> [T, out] for any number of rows, with a bias and without."""
    _check_products(case, case.build())


def check_products_in_16_bits(case: BackendCase) -> None:
    """The same, and products of a float32 weight, as routers have it, count in float32."""
    for backend in case.of_16_bits():
        _check_products(case, backend)
        weight = _random(backend, OUT, IN, seed=5).float().add(1e-3)  # which 16 bits would not hold
        packed, x = backend.pack_linear(weight.clone()), _random(backend, 17, IN, seed=6)
        wanted, what = x.double() @ weight.double().T, f"{case.name}: a product of a float32 weight"
        assert_near(packed(x.float()), wanted, torch.float32, what, PRODUCT)
        if isinstance(packed, Widens):
            assert_near(packed.widened(x), wanted, torch.float32, f"{what}, widened,", PRODUCT)


def _check_products(case: BackendCase, backend: Backend) -> None:
    weight, bias = _random(backend, OUT, IN), _random(backend, OUT, seed=1)
    for given in (None, bias):
        packed = backend.pack_linear(weight.clone(), None if given is None else given.clone())
        for count in ROWS:
            x = _random(backend, count, IN, seed=count)
            wanted = x.double() @ weight.double().T + (0 if given is None else given.double())
            assert_near(packed(x), wanted, backend.dtype, f"{case.name}: a product of {count} rows", PRODUCT)


def check_products_that_take_their_neighbours(case: BackendCase) -> None:
    """`Gates` and `FusesNorm`: the product with the norm in front and the gate behind, one after the other."""
    is_there = False
    for backend in case.of_any_dtype():
        weight = _random(backend, OUT, IN) * IN**-0.5
        packed = backend.pack_linear(weight.clone())
        for count in ROWS:
            if isinstance(packed, Gates):
                x, is_there = _random(backend, count, IN, seed=count), True
                wanted = ops.silu_and_mul(x @ weight.T)
                assert_near(packed.gated(x), wanted, backend.dtype, f"{case.name}: gated", PRODUCT)
            if isinstance(packed, FusesNorm):
                is_there = True
                for has_residual in (False, True):
                    _check_fused_norm(case, backend, packed, weight, count, has_residual)
    if not is_there:
        raise Skipped("its products are neither Gates nor FusesNorm")


def _check_fused_norm(
    case: BackendCase, backend: Backend, packed: FusesNorm, weight: Tensor, count: int, has_residual: bool
) -> None:
    x, norm = _random(backend, count, IN, seed=count), _random(backend, IN, seed=2)
    residual = _random(backend, count, IN, seed=3) if has_residual else None
    given = [(one, one.clone()) for one in (x, residual) if one is not None]
    total = x if residual is None else x + residual
    product = ops.rms_norm(total, norm, EPS) @ weight.T
    for name, wanted in (("after_norm", product), ("gated_after_norm", ops.silu_and_mul(product))):
        found, stream = getattr(packed, name)(x, residual, norm, EPS)
        what = f"{case.name}: {name} of {count} rows {'with' if has_residual else 'without'} a residual"
        assert_near(found, wanted, backend.dtype, what, PRODUCT)
        assert_near(stream, total, backend.dtype, f"{what}: the stream", FUNCTION)
        assert all(torch.equal(now, then) for now, then in given), f"{what} changes what it is given"


def check_products_of_any_batch_are_equal(case: BackendCase) -> None:
    """What `batch_invariant` means: a row's product has the same bits whatever stands beside it."""
    if "batch_invariant" not in case.build().caps.keeps:
        raise Skipped("it does not offer batch_invariant")
    for backend in case.of_any_dtype(batch_invariant=True):
        packed: Linear = backend.pack_linear(_random(backend, OUT, IN))
        x = _random(backend, 17, IN, seed=3)
        together = packed(x)
        for first, last in ((0, 1), (3, 5), (8, 17)):
            assert torch.equal(packed(x[first:last].contiguous()), together[first:last]), (
                f"{case.name}: rows {first} to {last} have other bits in a batch of their own, in {backend.dtype}"
            )


def check_layer_functions(case: BackendCase) -> None:
    """Each equals `framework.layers.ops`, up to rounding in another order."""
    _check_layer_functions(case, case.build())


def check_layer_functions_in_16_bits(case: BackendCase) -> None:
    """The same, and a norm of values whose squares 16 bits do not hold."""
    for backend in case.of_16_bits():
        _check_layer_functions(case, backend)
        x, weight = _random(backend, 5, 32) * 300, _random(backend, 32, seed=2)
        wanted = ops.rms_norm(x, weight, EPS)
        found = backend.layer_ops.rms_norm(x.clone(), weight, EPS)
        assert_near(found, wanted, backend.dtype, f"{case.name}: rms_norm of large values", FUNCTION)


def _check_layer_functions(case: BackendCase, backend: Backend) -> None:
    own = backend.layer_ops
    x, residual, weight = (_random(backend, *shape, seed=i) for i, shape in enumerate([(5, 32), (5, 32), (32,)]))
    heads = _random(backend, 5, 3, 16)
    cos, sin = (_random(backend, 5, 1, 16, seed=seed).float() for seed in (3, 4))
    pairs = {
        "rms_norm": (own.rms_norm(x.clone(), weight, EPS), ops.rms_norm(x, weight, EPS)),
        "layer_norm": (own.layer_norm(x.clone(), weight, weight, EPS), ops.layer_norm(x, weight, weight, EPS)),
        "silu_and_mul": (own.silu_and_mul(x.clone()), ops.silu_and_mul(x)),
        "gelu_tanh": (own.gelu_tanh(x.clone()), ops.gelu_tanh(x)),
        "gelu_tanh_and_mul": (own.gelu_tanh_and_mul(x.clone()), ops.gelu_tanh_and_mul(x)),
        "soft_cap": (own.soft_cap(x.clone(), 2.0), ops.soft_cap(x, 2.0)),
        "rotate": (own.rotate(heads.clone(), cos, sin), ops.rotate(heads, cos, sin)),
    }
    both = zip(
        own.add_rms_norm(x.clone(), residual.clone(), weight, EPS),
        ops.add_rms_norm(x.clone(), residual.clone(), weight, EPS),
        strict=True,
    )
    pairs |= {f"add_rms_norm[{i}]": pair for i, pair in enumerate(both)}
    for name, (found, wanted) in pairs.items():
        assert_near(found, wanted, backend.dtype, f"{case.name}: {name}", FUNCTION)


def check_norm_of_a_float32_weight_is_rounded_once(case: BackendCase) -> None:
    """Half a unit in the last place of the result, and what float32 adds, for one row and for more."""
    for backend in case.of_any_dtype():
        x, weight = _random(backend, 9, 32) * 30, _random(backend, 32, seed=2).float().add(1e-3)
        wide = x.double()
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        limit = 0.51 * torch.finfo(backend.dtype).eps * exact.abs() + 1e-5
        for count in (1, 9):
            rows = x[:count].clone()
            for name, found in (
                ("rms_norm", backend.layer_ops.rms_norm(rows, weight, EPS)),
                ("add_rms_norm", backend.layer_ops.add_rms_norm(rows.clone(), rows * 0, weight, EPS)[0]),
            ):
                what = f"{case.name}: {name} of a float32 weight in {backend.dtype}"
                assert found.dtype == backend.dtype, f"{what} gives {found.dtype}"
                is_near = (found.double() - exact[:count]).abs() <= limit[:count]
                assert bool(is_near.all()), f"{what} is not rounded once"


CHECKS = (
    check_products,
    check_products_in_16_bits,
    check_products_that_take_their_neighbours,
    check_products_of_any_batch_are_equal,
    check_layer_functions,
    check_layer_functions_in_16_bits,
    check_norm_of_a_float32_weight_is_rounded_once,
)
