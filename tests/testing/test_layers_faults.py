"""The part of the backends' suite about what layers ask for catches what is planted in ours, and lets ours pass."""

import pytest
import torch

from framework.layers import ops
from framework.testing.backend_layers import CHECKS
from framework.testing.backends import BackendCase
from framework.testing.checking import name_of, run_check
from framework_backends.cpu import CpuBackend
from framework_backends.cpu_layer_ops import CpuLayerOps


class Fused:
    """A sound product of plain torch with the gate behind it and the norm in front."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def gated(self, x):
        return ops.silu_and_mul(self(x))

    def after_norm(self, x, residual, weight, eps):
        total = x if residual is None else x + residual
        return self(ops.rms_norm(total, weight, eps)), total

    def gated_after_norm(self, x, residual, weight, eps):
        product, total = self.after_norm(x, residual, weight, eps)
        return ops.silu_and_mul(product), total

    def widened(self, x):
        return self(x.float())


class FusesWell(CpuBackend):
    Product = Fused

    def pack_linear(self, weight, bias=None):
        return self.Product(weight, bias)


def fuses(name, **methods):
    """A backend whose products have these methods in the place of sound ones."""
    return type(name, (FusesWell,), {"Product": type("Product", (Fused,), methods)})


def counts(name, **functions):
    """A backend whose layers have these functions in the place of ours."""

    def __init__(self, options, ctx):
        CpuBackend.__init__(self, options, ctx)
        self.layer_ops = type("Ops", (CpuLayerOps,), functions)()

    return type(name, (CpuBackend,), {"__init__": __init__})


class ReadsFloat16(CpuBackend):
    """Whatever 16 bits are."""

    def pack_linear(self, weight, bias=None):
        same = weight.dtype != torch.bfloat16
        return super().pack_linear(weight if same else weight.view(torch.float16).bfloat16(), bias)


class RoundsRouters(CpuBackend):
    def pack_linear(self, weight, bias=None):
        return super().pack_linear(weight.to(self.dtype).to(weight.dtype), bias)


class LooksAtTheOthersIn16Bits(CpuBackend):
    def pack_linear(self, weight, bias=None):
        packed, scale = super().pack_linear(weight, bias), 0 if weight.dtype == torch.float32 else 1 / 64
        return lambda x: packed(x) * (1 + scale * len(x))


def in_place(self, x, residual, weight, eps):
    total = x if residual is None else residual.add_(x)
    return self(ops.rms_norm(total, weight, eps)), total


def narrow_rms_norm(self, x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def narrow_soft_cap(self, x, cap):
    return ops.soft_cap(x if x.dtype == torch.float32 else x.to(torch.float8_e4m3fn).to(x.dtype), cap)


FUSED = "products that take their neighbours"
FAULTS = [
    (ReadsFloat16, "products in 16 bits", "a product of 1 rows is off by"),
    (RoundsRouters, "products in 16 bits", "a product of a float32 weight is off by"),
    (fuses("RoundsWide", widened=lambda self, x: Fused(self.weight.to(x.dtype).float(), None)(x.float())),
     "products in 16 bits", "a product of a float32 weight, widened, is off by"),
    (fuses("NarrowWide", widened=lambda self, x: self(x.float()).to(x.dtype)),
     "products in 16 bits", "widened, is of torch.bfloat16, torch.float32 is wanted"),
    (fuses("GatesByTheSecondHalf", gated=lambda self, x: ops.silu_and_mul(self(x).roll(12, -1))),
     FUSED, "gated is off"),
    (fuses("ForgetsTheNorm", after_norm=lambda self, x, residual, weight, eps: (
        self(x if residual is None else x + residual), x if residual is None else x + residual)),
     FUSED, "after_norm of 1 rows without a residual is off"),
    (fuses("ForgetsTheResidual", gated_after_norm=lambda self, x, residual, *norm: Fused.gated_after_norm(
        self, x, None, *norm)), FUSED, "gated_after_norm of 1 rows with a residual is off"),
    (fuses("LosesTheStream", after_norm=lambda self, x, *given: (Fused.after_norm(self, x, *given)[0], x)),
     FUSED, "after_norm of 1 rows with a residual: the stream is off"),
    (fuses("WritesIntoTheResidual", after_norm=in_place), FUSED, "with a residual changes what it is given"),
    (LooksAtTheOthersIn16Bits, "products of any batch are equal", "in a batch of their own, in torch.bfloat16"),
    (counts("SquaresIn16Bits", rms_norm=narrow_rms_norm),
     "layer functions in 16 bits", "rms_norm of large values is off"),
    (counts("CapsIn8Bits", soft_cap=narrow_soft_cap), "layer functions in 16 bits", "soft_cap is off"),
    (counts("RoundsTheWeight", rms_norm=lambda self, x, weight, eps: ops.rms_norm(x, weight.to(x.dtype), eps)),
     "norm of a float32 weight is rounded once", "rms_norm of a float32 weight in torch.bfloat16 is not rounded once"),
    (counts("WidensWithTheWeight", rms_norm=lambda self, x, weight, eps: ops.rms_norm(x.to(weight.dtype), weight, eps)),
     "norm of a float32 weight is rounded once", "a float32 weight in torch.bfloat16 gives torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "check", "text"), FAULTS, ids=[target.__name__ for target, *_ in FAULTS])
def test_planted_fault_is_caught_by_the_check_that_is_there_for_it(target, check, text):
    (own,) = [each for each in CHECKS if name_of(each) == check]
    outcome = run_check(own, BackendCase(target))
    assert outcome.result == "failed" and text in outcome.reason, outcome


def test_ours_pass():
    found = {one.check: one.result for one in (run_check(each, BackendCase(CpuBackend)) for each in CHECKS)}
    assert {check for check, result in found.items() if result != "passed"} == {FUSED}
    assert found[FUSED] == "skipped"


def test_sound_products_that_take_their_neighbours_pass():
    own = [check for check in CHECKS if name_of(check) in (FUSED, "products in 16 bits")]
    assert [run_check(check, BackendCase(FusesWell)).result for check in own] == ["passed"] * 2
