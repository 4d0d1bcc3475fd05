"""Thresholds one after the other keep what a float64 reference keeps that sorts, one stage at a time."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from framework import SamplingParams
from framework.sampling.interval import inside, open_interval
from framework.testing.stages import context, make_rows, new_request
from framework_samplers.epsilon import Epsilon
from framework_samplers.eta import Eta
from framework_samplers.min_p import MinP
from framework_samplers.top_k import TopK
from framework_samplers.top_n_sigma import TopNSigma
from framework_samplers.top_p import TopP
from framework_samplers.typical import Typical

STAGES = (MinP, TopK, TopP, Typical, TopNSigma, Epsilon, Eta)
NEAR = 1e-5
"""What lies nearer to a bound may fall on either side of it in float32."""


def kept_by(name, value, logits):
    """(tokens that the stage keeps of those in float64 logits that are not -inf, distance of the nearest to its bound).

    Each is written as a number that a token has, and a bound that it must not exceed.
    """
    there = logits > -math.inf
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    entropy = -(p * log_p).nansum()
    mass_before = torch.tensor([float(p[logits > x].sum()) for x in logits])
    best = logits == logits.max()
    if name == "min_p":
        cost, bound = logits.max() - logits, -math.log(value)
    elif name == "top_k":
        cost, bound = torch.tensor([float((logits > x).sum()) for x in logits]), value - 1
    elif name == "top_p":
        cost, bound = mass_before, value
    elif name == "typical":
        distance = (log_p + entropy).abs()
        cost = torch.tensor([float(p[distance < x - 1e-9].sum()) for x in distance])
        bound, best = value, distance == distance[there].min()
    elif name == "top_n_sigma":
        cost, bound = logits.max() - logits, value * logits[there].std(correction=0)
    else:
        floor = value if name == "epsilon" else min(value, math.sqrt(value) * math.exp(-float(entropy)))
        cost, bound = -log_p, -math.log(floor)
    bound = float(bound)
    margin = (cost - bound).abs()[there & ~best]
    is_count = name == "top_k"
    return there & ((cost <= bound) | best), math.inf if is_count or not len(margin) else float(margin.min())


VALUES = {
    "min_p": st.floats(0.001, 0.9), "top_k": st.integers(2, 60), "top_p": st.floats(0.05, 0.99),
    "typical": st.floats(0.05, 0.99), "top_n_sigma": st.floats(0.2, 4), "epsilon": st.floats(1e-4, 0.3),
    "eta": st.floats(1e-4, 0.3),
}  # fmt: skip


def request(name, value):
    if name in ("min_p", "top_k", "top_p"):
        return SamplingParams(**{name: value})
    argument = {"typical": "mass", "top_n_sigma": "n"}.get(name, "epsilon")
    return SamplingParams(extra_args={name: {argument: value}})


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 10**6), st.integers(2, 80), st.floats(0.1, 5),
    st.lists(st.sampled_from(STAGES), min_size=2, max_size=5, unique=True), st.data(),
)  # fmt: skip
def test_mixed_thresholds_keep_what_the_reference_keeps(seed, vocab, scale, stages, data):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    rows, (lo, hi) = make_rows([1]), open_interval(1, logits.device)
    exact = logits[0].double()
    for target in stages:
        name = target.spec.name
        value = data.draw(VALUES[name], label=name)
        stage, one = target({}, context(target.spec, vocab, 2)), request(name, value)
        stage.validate(one)
        stage.add_request(1, one, new_request(1, one))
        lo, hi = stage.bounds(logits, rows, lo, hi)
        kept, margin = kept_by(name, value, exact)
        assume(margin > NEAR * (1 + scale))
        exact = exact.masked_fill(~kept, -math.inf)
        assert torch.equal(inside(logits, lo, hi)[0] > -math.inf, kept), f"{name}={value}"
