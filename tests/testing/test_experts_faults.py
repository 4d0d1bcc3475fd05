"""The part of the backends' suite about experts catches what is planted in ours, and lets ours pass."""

from dataclasses import replace

import pytest
import torch

from framework.testing.backend_experts import CHECKS
from framework.testing.backends import BackendCase
from framework.testing.checking import name_of, run_check
from framework_backends.cpu import CpuBackend


class Wrapped:
    """Experts that something is done to on their way in or out."""

    def __init__(self, packed):
        self.packed = packed

    @property
    def counts(self):
        return self.packed.counts

    def __call__(self, x, logits, num_tokens=None):
        return self.packed(x, logits, num_tokens)


class CountsPadding(CpuBackend):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits)

    def pack_experts(self, weights, routing):
        return self.Experts(super().pack_experts(weights, routing))


class SpoilsPadding(CpuBackend):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            out = self.packed(x, logits, num_tokens)
            if num_tokens is not None:
                out[int(num_tokens) :] = torch.nan
            return out

    def pack_experts(self, weights, routing):
        return self.Experts(super().pack_experts(weights, routing))


class ChoosesTheHigher(CpuBackend):
    class Experts(Wrapped):
        @property
        def counts(self):
            return self.packed.counts.flip(0)

        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits.flip(1), num_tokens)

    def pack_experts(self, weights, routing):
        turned = {k: v.flip(0) if isinstance(v, torch.Tensor) else v for k, v in vars(weights).items()}
        bias = None if routing.bias is None else routing.bias.flip(0)
        return self.Experts(super().pack_experts(type(weights)(**turned), replace(routing, bias=bias)))


class LooksAtTheOthers(CpuBackend):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits, num_tokens) * (1 + 1e-6 * len(x))

    def pack_experts(self, weights, routing):
        return self.Experts(super().pack_experts(weights, routing))


def routes(name, **changes):
    """A backend that routes otherwise than it is told."""

    def pack_experts(self, weights, routing):
        return CpuBackend.pack_experts(self, weights, replace(routing, **changes))

    return type(name, (CpuBackend,), {"pack_experts": pack_experts})


ForgetsTheBias = routes("ForgetsTheBias", bias=None)
ForgetsTheScale = routes("ForgetsTheScale", scale=1.0)
ForgetsTheGroups = routes("ForgetsTheGroups", num_groups=1, num_chosen_groups=1)
GoesByTheBestOfAGroup = routes("GoesByTheBestOfAGroup", group_score="max")


class ForgetsBiases(CpuBackend):
    def pack_experts(self, weights, routing):
        return super().pack_experts(replace(weights, gate_up_bias=None, down_bias=None), routing)


class ForgetsTheLimit(CpuBackend):
    def pack_experts(self, weights, routing):
        return super().pack_experts(replace(weights, limit=7.0), routing)


FAULTS = [
    (CountsPadding, "padding is not counted", "padding is counted"),
    (SpoilsPadding, "padding is not counted", "is not finite"),
    (ChoosesTheHigher, "equal scores choose the lower expert", "of equal scores it chooses"),
    (LooksAtTheOthers, "experts of any batch are equal", "have other bits in a batch of their own"),
    (ForgetsTheBias, "experts", "experts by groups by their two best, biased (silu) are off"),
    (ForgetsTheScale, "experts", "experts by sigmoid (silu) are off"),
    (ForgetsTheGroups, "experts", "experts by groups by their best (silu) are off"),
    (GoesByTheBestOfAGroup, "experts", "experts by groups by their two best, biased (silu) are off"),
    (ForgetsBiases, "experts", "(clamped) are off"),
    (ForgetsTheLimit, "experts", "(clamped) are off"),
]


@pytest.mark.parametrize(("target", "check", "text"), FAULTS, ids=[target.__name__ for target, *_ in FAULTS])
def test_planted_fault_is_caught_by_the_check_that_is_there_for_it(target, check, text):
    (own,) = [each for each in CHECKS if name_of(each) == check]
    outcome = run_check(own, BackendCase(target))
    assert outcome.result == "failed" and text in outcome.reason, outcome


def test_ours_pass():
    assert [run_check(each, BackendCase(CpuBackend)).result for each in CHECKS] == ["passed"] * len(CHECKS)
