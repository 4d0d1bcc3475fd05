"""Which stages a backend's operations get, in which chains; what they give is what the stages alone give."""

from dataclasses import replace

import pytest
import torch

from framework import SamplingParams
from framework.interfaces import Capabilities, FusedChoice, StageSpec
from framework.sampling.groups import best
from framework.sampling.interval import inside

ALL = frozenset({"kept_set", "argmax"})


class Stage:
    """What every request wants, and a backend may fuse: it hands itself over as its operand."""

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return True

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def commit(self, rows, sampled, num_valid):
        pass

    def operands(self, rows):
        return {"stage": self}


class NoLast(Stage):
    spec = StageSpec("no_last", "mask", fused="mask", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def apply(self, logits, rows):
        logits[:, -1] = -torch.inf


class Rise(Stage):
    """Higher ids become likelier; the last id is let in, whatever masked it."""

    spec = StageSpec("rise", "elementwise", fused="bias")

    def apply(self, logits, rows):
        logits.nan_to_num_(neginf=0.0).add_(torch.arange(logits.shape[1]))


class Add(Rise):
    """Higher ids become likelier."""

    spec = StageSpec("add", "elementwise", fused="bias", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def apply(self, logits, rows):
        logits.add_(torch.arange(logits.shape[1]))


class Double(Stage):
    spec = StageSpec("double", "elementwise", fused="scale", caps=Capabilities(keeps=ALL))

    def apply(self, logits, rows):
        logits.mul_(2)


class Square(Double):
    """No operation of the backend."""

    spec = StageSpec("square", "elementwise", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def apply(self, logits, rows):
        logits.mul_(logits.abs())


class Half(Stage):
    """Keeps the better half."""

    spec = StageSpec("half", "threshold", fused="half", caps=Capabilities(keeps=ALL))

    def bounds(self, logits, rows, lo, hi):
        return torch.maximum(lo, inside(logits, lo, hi).median(-1).values), hi


class Least(Stage):
    """Takes the worst of the kept tokens."""

    spec = StageSpec("least", "select", fused="draw", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def select(self, logits, rows, lo, hi):
        kept = inside(logits, lo, hi)
        return torch.where(kept > -torch.inf, kept, torch.inf).argmin(-1)


class Ops:
    """Runs chains by the methods of their stages, and takes down their names."""

    fuses = ("mask", "bias", "scale", "half", "draw", "argmax")
    compiles = False

    def __init__(self):
        self.chains = []

    def take_down(self, chain):
        self.chains.append([name for name, _ in chain])

    def apply(self, logits, rows, chain):
        self.take_down(chain)
        return self._applied(logits, rows, [o["stage"] for _, o in chain])

    def _applied(self, logits, rows, stages):
        logits = logits.to(torch.float32, copy=True)
        for stage in stages:
            stage.apply(logits, rows)
        return logits

    def bounds(self, logits, rows, chain, lo, hi):
        self.take_down(chain)
        for _, operands in chain:
            lo, hi = operands["stage"].bounds(logits, rows, lo, hi)
        return lo, hi

    def sample(self, logits, rows, chain, interval):
        self.take_down(chain)
        stages = [o["stage"] for name, o in chain if name != "argmax"]
        logits = self._applied(logits, rows, [s for s in stages if hasattr(s, "apply")])
        wide = torch.full((len(logits),), torch.inf)
        lo, hi = interval or (-wide, wide)
        for stage in stages:
            if hasattr(stage, "bounds"):
                lo, hi = stage.bounds(logits, rows, lo, hi)
        top, ids = best(logits)
        if chain[-1][0] == "draw":
            ids = stages[-1].select(logits, rows, lo, hi)
        value = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        return FusedChoice(ids, ids, top, value)

    def logprobs(self, logits, ids, k, *, is_log):
        raise AssertionError("nobody asks")


class Again(Double):
    """The same operation once more."""

    spec = replace(Double.spec, name="again")


class HalfAgain(Half):
    """The same operation once more."""

    spec = replace(Half.spec, name="half_again")


class Own(Least):
    """No operation of the backend."""

    spec = replace(Least.spec, name="own", fused=None)


STAGES = {one.spec.name: one for one in (NoLast, Rise, Add, Double, Square, Half, Least, Again, HalfAgain)}
PLAIN = [SamplingParams()] * 3


@pytest.mark.parametrize(
    ("names", "chains"),
    [
        (["no_last", "add", "double", "half", "least"], [["mask", "bias", "scale", "half", "draw"]]),
        (["double", "add", "half", "least"], [["scale"], ["bias", "half", "draw"]]),
        (["double", "again", "least"], [["scale"], ["scale", "draw"]]),
        (["half", "half_again", "least"], [["half"], ["half", "draw"]]),
        (["no_last", "square", "double", "least"], [["mask"], ["scale", "draw"]]),
        (["no_last", "rise", "least"], [["mask"], ["draw"]]),
        (["add", "double", "square", "least"], [["bias", "scale"], ["draw"]]),
    ],
)
def test_chains_rise_in_the_backends_order_and_others_run_between(bench, names, chains):
    ops = Ops()
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone, fused = (bench(*names, others=STAGES, **words).add(*PLAIN) for words in ({}, {"ops": ops}))
    assert fused.ids(logits) == alone.ids(logits)
    assert ops.chains == chains


def test_greedy_rows_alone_end_in_argmax(bench):
    ops = Ops()
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    alone, fused = (
        bench("add", "half", "gumbel", others=STAGES, **words).add(*[SamplingParams(temperature=0)] * 2)
        for words in ({}, {"ops": ops})
    )
    assert fused.ids(logits) == alone.ids(logits)
    assert ops.chains == [["bias", "argmax"]]


def test_a_select_stage_that_is_not_fused_leaves_the_step_to_the_stages(bench):
    ops, others = Ops(), {**STAGES, "own": Own}
    fused = bench("add", "own", others=others, ops=ops).add(*PLAIN)
    assert fused.ids(torch.zeros(3, 50)) == [0, 0, 0] and ops.chains == []
