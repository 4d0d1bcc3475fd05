"""The part of the backends' suite about experts catches what is planted in ours, and lets ours pass."""

from dataclasses import replace

import pytest
import torch

from framework.errors import ConfigError
from framework.layers.experts import ReferenceExperts, combine, count_tokens, route
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


class WrapsExperts(CpuBackend):
    Experts = Wrapped

    def pack_experts(self, weights, routing):
        return self.Experts(super().pack_experts(weights, routing))


class CountsPadding(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits)


class CountsPaddingOfMany(WrapsExperts):
    """As where one of two kernels does not look at the number of tokens."""

    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits, num_tokens if len(x) < 16 else None)


class CountsTheLastCall(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            self.packed.counts.zero_()
            return self.packed(x, logits, num_tokens)


class GivesCopiesOfItsCounts(WrapsExperts):
    class Experts(Wrapped):
        @property
        def counts(self):
            return self.packed.counts.clone()


class SpoilsPadding(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            out = self.packed(x, logits, num_tokens)
            if num_tokens is not None:
                out[int(num_tokens) :] = torch.nan
            return out


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


class LooksAtTheOthers(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits, num_tokens) * (1 + 1e-6 * len(x))


class LooksAtTheOthersIn16Bits(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            out = self.packed(x, logits, num_tokens)
            return out if x.dtype == torch.float32 else out * (1 + len(x) / 64)


class RoundsLogits(WrapsExperts):
    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits.to(x.dtype), num_tokens)


class ReadsFloat16(CpuBackend):
    """Whatever 16 bits are."""

    def pack_experts(self, weights, routing):
        if weights.down.dtype == torch.bfloat16:
            weights = replace(weights, down=weights.down.view(torch.float16).bfloat16())
        return super().pack_experts(weights, routing)


class SpoilsAllByOne(WrapsExperts):
    """As a kernel does that sums rows which it has multiplied by 0."""

    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            return self.packed(x, logits, num_tokens) + 0 * logits.sum()


class ChoosesOneAgain(WrapsExperts):
    """As a kernel does that takes the best one out by a comparison, which no number fails."""

    class Experts(Wrapped):
        def __call__(self, x, logits, num_tokens=None):
            out, counts, routing = self.packed(x, logits, num_tokens), self.packed.counts, self.packed._routing
            for token in (~logits.isfinite()).any(-1).nonzero().flatten():
                counts[route(logits[token : token + 1], routing)[0][0]] -= 1
                counts[0] += routing.k
            return out


def routes(name, **changes):
    """A backend that routes otherwise than it is told."""

    def pack_experts(self, weights, routing):
        return CpuBackend.pack_experts(self, weights, replace(routing, **changes))

    return type(name, (CpuBackend,), {"pack_experts": pack_experts})


ForgetsTheBias = routes("ForgetsTheBias", bias=None)
ForgetsTheScale = routes("ForgetsTheScale", scale=1.0)
ForgetsTheGroups = routes("ForgetsTheGroups", num_groups=1, num_chosen_groups=1)
GoesByTheBestOfAGroup = routes("GoesByTheBestOfAGroup", group_score="max")


class Adding(ReferenceExperts):
    """Sound experts that add beside."""

    def beside(self, other, x, logits, num_tokens=None):
        ids, weights = route(logits, self._routing)
        count_tokens(self.counts, ids, num_tokens)
        every = torch.stack([self._feed_forward(expert, x) for expert in range(len(self.counts))], 1)
        outputs = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[1]))
        return (combine(outputs, weights, torch.float32) + other.float()).to(x.dtype)


class AddsWell(CpuBackend):
    Experts = Adding

    def pack_experts(self, weights, routing):
        return self.Experts(weights, routing)


def adds(name, beside):
    """A backend whose experts add as `beside(sound experts, other, x, logits, num_tokens)` does."""
    return type(name, (AddsWell,), {"Experts": type("Adds", (Adding,), {"beside": beside})})


sound = Adding.beside
ForgetsTheOther = adds("ForgetsTheOther", lambda self, other, *given: self(*given))
RoundsTwice = adds("RoundsTwice", lambda self, other, *given: self(*given) + other)
CountsPaddingBeside = adds("CountsPaddingBeside", lambda self, other, x, logits, n=None: sound(self, other, x, logits))
CountsNothingBeside = adds(
    "CountsNothingBeside", lambda self, other, *given: sound(self, other, *given) + 0 * self.counts.zero_().sum()
)
SpoilsPaddingBeside = adds(
    "SpoilsPaddingBeside",
    lambda self, other, x, logits, n=None: sound(self, other, x, logits, n).where(
        torch.arange(len(x))[:, None] < (len(x) if n is None else n), torch.nan
    ),
)


class LooksAtTheOthersBeside(WrapsExperts):
    class Experts(Wrapped):
        def beside(self, other, x, logits, num_tokens=None):
            return self.packed(x, logits, num_tokens) + other * len(other)


class ForgetsBiases(CpuBackend):
    def pack_experts(self, weights, routing):
        return super().pack_experts(replace(weights, gate_up_bias=None, down_bias=None), routing)


class ForgetsTheLimit(CpuBackend):
    def pack_experts(self, weights, routing):
        return super().pack_experts(replace(weights, limit=7.0), routing)


FAULTS = [
    (CountsPadding, "padding is not counted", "padding is counted"),
    (CountsPaddingOfMany, "counts add up over calls", "calls at first count"),
    (CountsTheLastCall, "counts add up over calls", "calls at first count"),
    (GivesCopiesOfItsCounts, "counts add up over calls", "calls once they were set to 0 count"),
    (SpoilsPadding, "padding is not counted", "is not finite"),
    (ChoosesTheHigher, "equal scores choose the lower expert", "of equal scores it chooses"),
    (LooksAtTheOthers, "experts of any batch are equal", "have other bits in a batch of their own"),
    (LooksAtTheOthersIn16Bits, "experts of any batch are equal", "of their own, in torch.bfloat16"),
    (LooksAtTheOthersBeside, "experts of any batch are equal", "of their own beside another output, in torch.float32"),
    (RoundsLogits, "experts in 16 bits", "chooses experts [0, 1, 2] by logits of 16 bits, [9, 10, 11] are"),
    (ReadsFloat16, "experts in 16 bits", "experts by softmax (silu) is off by"),
    (SpoilsAllByOne, "logits that are no numbers harm nobody else", "beside logits that are not finite is off by inf"),
    (ChoosesOneAgain, "logits that are no numbers harm nobody else", "3 tokens of 3 different experts each are"),
    (ForgetsTheOther, "another output is added beside", "that of experts by softmax is off by"),
    (CountsPaddingBeside, "another output is added beside", "beside another output, experts count"),
    (CountsNothingBeside, "another output is added beside", "beside another output, experts count"),
    (SpoilsPaddingBeside, "another output is added beside", "beside padding is not finite"),
    (RoundsTwice, "the sum beside is rounded once", "the sum beside 1 tokens is rounded twice"),
    (ForgetsTheBias, "experts", "experts by groups by their two best, biased (silu) is off"),
    (ForgetsTheScale, "experts", "experts by sigmoid (silu) is off"),
    (ForgetsTheGroups, "experts", "experts by groups by their best (silu) is off"),
    (GoesByTheBestOfAGroup, "experts", "experts by groups by their two best, biased (silu) is off"),
    (ForgetsBiases, "experts", "(clamped) is off"),
    (ForgetsTheLimit, "experts", "(clamped) is off"),
]


@pytest.mark.parametrize(("target", "check", "text"), FAULTS, ids=[target.__name__ for target, *_ in FAULTS])
def test_planted_fault_is_caught_by_the_check_that_is_there_for_it(target, check, text):
    (own,) = [each for each in CHECKS if name_of(each) == check]
    outcome = run_check(own, BackendCase(target))
    assert outcome.result == "failed" and text in outcome.reason, outcome


def test_ours_pass():
    found = {one.check: one.result for one in (run_check(each, BackendCase(CpuBackend)) for each in CHECKS)}
    besides = {"another output is added beside", "the sum beside is rounded once"}
    assert {check for check, result in found.items() if result == "skipped"} == besides
    assert {check for check, result in found.items() if result == "passed"} == found.keys() - besides


def test_sound_experts_that_add_beside_pass():
    case = BackendCase(AddsWell)
    own = [check for check in CHECKS if "beside" in name_of(check)]
    assert [run_check(check, case).result for check in own] == ["passed"] * 2


class Refuses(CpuBackend):
    """words: dtypes that it does not serve."""

    words = ("bfloat16",)

    def __init__(self, options, ctx):
        if ctx.dtype in self.words:
            raise ConfigError(f"engine.dtype={ctx.dtype} is not served here. Use another one")
        super().__init__(options, ctx)


class RefusesBoth(Refuses):
    words = ("bfloat16", "float16")


class RefusesWithoutAName(CpuBackend):
    def __init__(self, options, ctx):
        if ctx.dtype != "float32":
            raise ConfigError("something else is wrong")
        super().__init__(options, ctx)


class IgnoresTheDtype(CpuBackend):
    def __init__(self, options, ctx):
        super().__init__(options, replace(ctx, dtype="float32"))


@pytest.mark.parametrize(
    ("target", "result", "text"),
    [
        (Refuses, "passed", ""),
        (RefusesBoth, "skipped", "it serves no dtype of 16 bits: engine.dtype=bfloat16 is not served here"),
        (RefusesWithoutAName, "failed", "refuses engine.dtype=bfloat16 without naming it: something else"),
        (IgnoresTheDtype, "failed", "computes in torch.float32 when bfloat16 is asked for"),
    ],
)
def test_dtype_is_served_or_refused_by_name(target, result, text):
    (own,) = [each for each in CHECKS if name_of(each) == "experts in 16 bits"]
    outcome = run_check(own, BackendCase(target))
    assert outcome.result == result and text in outcome.reason, outcome
