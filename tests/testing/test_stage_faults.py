"""The kit catches every fault that is planted in a sound stage, each by the check that is there for it."""

import pytest
import torch

from framework import SamplingParams
from framework.batch import PER_TOKEN, Field
from framework.interfaces import Capabilities
from framework.sampling.history import taken
from framework.testing.checking import name_of, run_check
from framework.testing.stages import CHECKS, StageCase

from .sound_stages import EVERY_WORD, Counting, Draws, Floor, NotTwice, Telling, paying

SOUND = {
    "counting": StageCase(Counting, paying("counting", 0.5, 2.0)),
    "not_twice": StageCase(NotTwice, paying("not_twice", 1.0, 2.0)),
    "draws": StageCase(Draws, (SamplingParams(), SamplingParams(seed=3))),
    "floor": StageCase(Floor, paying("floor", 0.5, 2.0)),
    "telling": StageCase(Telling, paying("telling", 0.5, 2.0)),
}
FAULTS = {}


def fault(base, check, text):
    """Registers the members of a class as a fault of `base` that `check` must name with `text`."""

    def register(members):
        spec = members.__dict__.get("spec", base.spec)
        bad = type(base.__name__, (base,), {**members.__dict__, "spec": spec})
        FAULTS[members.__name__] = (bad, check, text)
        return members

    return register


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_stage_passes_every_check(name):
    outcomes = [run_check(check, SOUND[name]) for check in CHECKS]
    assert [o for o in outcomes if o.result == "failed"] == []


# ------------------------------------------------------------------------------------------------ state and rows


@fault(Counting, "reused row keeps nothing", "keeps something")
class KeepsTheOldCounts:
    def add_request(self, req_idx, params, request):
        slot = int(self.counts.slot[req_idx])
        before = self.counts.dev[slot].clone()
        Counting.add_request(self, req_idx, params, request)
        self.counts.dev[int(self.counts.slot[req_idx])] += before


@fault(Counting, "state lives in fields", "outside of its declared fields")
class CountsInADict:
    def add_request(self, req_idx, params, request):
        Counting.add_request(self, req_idx, params, request)
        self.own = getattr(self, "own", {})
        self.own[req_idx] = self.counts.dev[int(self.counts.slot[req_idx])].clone()

    def apply(self, logits, rows):
        for place, row in enumerate(rows.req_idx_np.tolist()):
            if self.rate.np[row]:
                logits[place] -= float(self.rate.np[row]) * getattr(self, "own", {}).get(row, torch.zeros(1))

    def commit(self, rows, sampled, num_valid):
        for place, row in enumerate(rows.req_idx_np.tolist()):
            if row in getattr(self, "own", {}):
                self.own[row][sampled[place, 0]] += 1


@fault(Floor, "plain rows pass unchanged", "changes a row that did not want it")
class NeutralValueIsNotNeutral:
    spec = Floor.spec.__class__(
        "floor",
        kind="threshold",
        fields=(Field("depth", "float32", init=5.0),),
        caps=Floor.spec.caps,
        extra_args=("rate",),
    )


@fault(Counting, "place 0 of a pool stays neutral", "place 0 of the pooled field 'counts'")
class WritesIntoNobodysPlace:
    def commit(self, rows, sampled, num_valid):
        token, was_taken = taken(rows, sampled, num_valid)
        slot = self.counts.slot[rows.req_idx].long()
        self.counts.dev.index_put_((slot, token), was_taken.int(), accumulate=True)

    def apply(self, logits, rows):  # place 0 does no harm yet: nobody reads it
        wanted = (self.counts.slot[rows.req_idx] > 0).unsqueeze(1)
        before = logits.clone()
        Counting.apply(self, logits, rows)
        logits.copy_(torch.where(wanted, logits, before))


@fault(Counting, "steps among others", "among others")
class CommitsByThePlaceInTheBatch:
    def commit(self, rows, sampled, num_valid):
        token, was_taken = taken(rows, sampled, num_valid)
        slot = self.counts.slot[rows.req_idx.sort().values].long()
        self.counts.dev.index_put_((slot, token), (was_taken & (slot > 0)).int(), accumulate=True)


@fault(Floor, "shuffled batch", "follow the place in the batch")
class ReadsThePlaceInTheBatch:
    def bounds(self, logits, rows, lo, hi):
        top = logits.where(logits <= hi.unsqueeze(1), -torch.inf).amax(-1)
        return torch.maximum(lo, top - self.depth.dev[1 : len(logits) + 1]), hi


@fault(NotTwice, "plain rows pass unchanged", "did not want it")
class BansForEveryRow:
    def apply(self, logits, rows):
        last = self.token_ids[rows.req_idx, rows.position - 1].long().unsqueeze(1)
        logits.scatter_(1, last, -torch.inf)


@fault(Counting, "neighbours change nothing", "a neighbour changes row")
class OneFlagForTheBatch:
    def apply(self, logits, rows):
        Counting.apply(self, logits, rows)
        logits.add_(0.0 if (self.rate.dev[rows.req_idx] == 0).any() else 1.0)


@fault(Draws, "neighbours change nothing", "a neighbour changes row")
class OneSeedForTheBatch:
    def select(self, logits, rows, lo, hi):
        from framework.sampling.draw import draw

        return draw(logits, rows.seed[:1].expand_as(rows.seed), rows.position, lo, hi)


@fault(Draws, "second call is equal", "second call")
class OneGeneratorForAll:
    def select(self, logits, rows, lo, hi):
        from framework.sampling.interval import inside

        return inside(logits, lo, hi).softmax(-1).nan_to_num(1.0).multinomial(1).squeeze(1)


@fault(Draws, "each request draws by its own seed", "eight seeds draw")
class TheSameSeedForEverybody:
    def select(self, logits, rows, lo, hi):
        from framework.sampling.draw import draw

        return draw(logits, torch.zeros_like(rows.seed), rows.position, lo, hi)


@fault(Telling, "shuffled batch", "follow the place in the batch")
class TellsTheOrderOfTheTable:
    def observe(self, raw_logits, logits, rows, ids):
        return ids, raw_logits.amax(-1), self.rate.dev[rows.req_idx.sort().values]


@fault(Telling, "neighbours change nothing", "a neighbour changes row")
class TellsOfTheBatch:
    def observe(self, raw_logits, logits, rows, ids):
        return ids, raw_logits.amax().expand(len(ids)), self.rate.dev[rows.req_idx]


@fault(Telling, "state lives in fields", "outside of its declared fields")
class TellsHowOftenItWasAsked:
    def collect(self, payload):
        self.count = getattr(self, "count", 0) + 1
        return [{**one, "count": self.count} for one in Telling.collect(self, payload)]


@fault(NotTwice, "request is left alone", "changes the request")
class SortsThePrompt:
    def add_request(self, req_idx, params, request):
        NotTwice.add_request(self, req_idx, params, request)
        request.token_ids.sort()


@fault(Draws, "each request draws by its own seed", "eight positions draw")
class DrawsTheSameAtEveryPosition:
    def select(self, logits, rows, lo, hi):
        from framework.sampling.draw import draw

        return draw(logits, rows.seed, torch.zeros_like(rows.position), lo, hi)


# ------------------------------------------------------------------------------------------------ captured steps


@fault(Counting, "captured step serves other rows", "reads a value")
class AsksWhetherAnybodyWants:
    def apply(self, logits, rows):
        if (self.rate.dev[rows.req_idx] > 0).any():
            Counting.apply(self, logits, rows)


@fault(Floor, "captured step serves other rows", "selects by a boolean mask")
class SelectsRows:
    def bounds(self, logits, rows, lo, hi):
        wanting = self.depth.dev[rows.req_idx] < torch.inf
        new, hi = Floor.bounds(self, logits, rows, lo, hi)
        lo = lo.clone()
        lo[wanting] = new[wanting]
        return lo, hi


@fault(Draws, "captured step serves other rows", "brings a tensor to the host: .tolist()")
class ReadsSeedsOnTheHost:
    def select(self, logits, rows, lo, hi):
        seeds = torch.tensor(rows.seed.tolist())
        return Draws.select(self, logits, type(rows)(**{**vars(rows), "seed": seeds}), lo, hi)


@fault(Floor, "captured step serves other rows", "what it did for those that it was captured with")
class ReadsTheHostMirrorInAStep:
    def bounds(self, logits, rows, lo, hi):
        top = logits.where(logits <= hi.unsqueeze(1), -torch.inf).amax(-1)
        return torch.maximum(lo, top - torch.from_numpy(self.depth.np[rows.req_idx_np])), hi


@fault(Counting, "captured step serves other rows", "in its commit: see field 'counts'")
class CommitsToTheRowsOfTheHost:
    def commit(self, rows, sampled, num_valid):
        token, was_taken = taken(rows, sampled, num_valid)
        slot = self.counts.slot[torch.from_numpy(rows.req_idx_np)].long()
        self.counts.dev.index_put_((slot, token), (was_taken & (slot > 0)).int(), accumulate=True)


# ------------------------------------------------------------------------------------------------ history and time


@fault(Counting, "preempted request goes on", "goes on otherwise")
class ForgetsItsOutputs:
    def add_request(self, req_idx, params, request):
        self.rate.np[req_idx] = 1.0
        self.counts.take(req_idx)


@fault(Counting, "preempted request goes on", "goes on otherwise")
class CountsOneStepLate:
    spec = Counting.spec.__class__(
        "counting",
        kind="elementwise",
        fields=(*Counting.spec.fields, Field("last", "int64", init=-1)),
        caps=Counting.spec.caps,
        extra_args=("rate",),
    )

    def __init__(self, options, ctx):
        Counting.__init__(self, options, ctx)
        self.last = ctx.column("last")

    def add_request(self, req_idx, params, request):
        Counting.add_request(self, req_idx, params, request)
        self.last.np[req_idx] = -1

    def commit(self, rows, sampled, num_valid):
        token, _ = taken(rows, sampled, num_valid)
        before = self.last.dev[rows.req_idx]
        slot = self.counts.slot[rows.req_idx].long()
        counted = ((before >= 0) & (slot > 0)).int()
        self.counts.dev.index_put_((slot, before.clamp(min=0)), counted, accumulate=True)
        self.last.dev[rows.req_idx] = token


@fault(NotTwice, "history ends at the position", "at or behind the position")
class ReadsThePlaceholder:
    def apply(self, logits, rows):
        last = self.token_ids[rows.req_idx, rows.position].long().unsqueeze(1)
        bound = torch.where(self.is_on.dev[rows.req_idx].unsqueeze(1), -torch.inf, torch.inf)
        logits.scatter_reduce_(1, last, bound, "amin")


@fault(Counting, "commit takes valid tokens only", "drafts of which not all were taken")
class CountsRejectedTokens:
    def commit(self, rows, sampled, num_valid):
        Counting.commit(self, rows, sampled, torch.full_like(num_valid, sampled.shape[1]))


@fault(Counting, "draft rows see the drafts before them", "behind 1 drafts")
class DraftRowsSeeNoDrafts:
    def apply(self, logits, rows):
        counts = self.counts.dev[self.counts.slot[rows.req_idx].long()].float()
        logits.sub_(self.rate.dev[rows.req_idx].unsqueeze(1) * counts)


@fault(Counting, "chunked prompt changes nothing", "steps of others before its first token")
class CommitsToRowsThatAreNotThere:
    def commit(self, rows, sampled, num_valid):
        slots = self.counts.slot[self.counts.slot > 0].long()
        self.counts.dev[slots, sampled[0, 0]] += 1


# ------------------------------------------------------------------------------------------------ what a kind may do


@fault(Floor, "second call is equal", "writes into the interval")
class WritesIntoTheInterval:
    def bounds(self, logits, rows, lo, hi):
        new, hi = Floor.bounds(self, logits, rows, lo, hi)
        return lo.copy_(new), hi


@fault(Floor, "kept set", "widens the interval")
class ForgetsTheIntervalItWasGiven:
    def bounds(self, logits, rows, lo, hi):
        depth = self.depth.dev[rows.req_idx]
        return torch.where(depth < torch.inf, logits.amax(-1) - depth - 9, lo), hi


@fault(Draws, "kept set", "outside of the interval")
class PositionsOfAReducedList:
    def select(self, logits, rows, lo, hi):
        return logits.topk(50, -1).values.argmin(-1)


@fault(Counting, "it acts on who wants it", "changes nothing in any step")
class ThrowsItsResultAway:
    def apply(self, logits, rows):
        Counting.apply(self, logits.clone(), rows)


@fault(Floor, "it acts on who wants it", "changes nothing in any step")
class GivesTheIntervalBack:
    def bounds(self, logits, rows, lo, hi):
        return lo, hi


@fault(Counting, "masked tokens never become nan", "makes NaN of -inf")
class NanFromInfinity:
    def apply(self, logits, rows):
        wanted = (self.rate.dev[rows.req_idx] > 0).unsqueeze(1)
        logits.copy_(torch.where(wanted, logits - logits * 0.5 - logits, logits))


@fault(Floor, "results have their shape", "float32 [2] is wanted")
class BoundsOfAnotherType:
    def bounds(self, logits, rows, lo, hi):
        lo, hi = Floor.bounds(self, logits, rows, lo, hi)
        return lo.double(), hi


@fault(Counting, "bad parameters are refused", "validate accepts")
class AcceptsAnything:
    def validate(self, params):
        pass


@fault(Counting, "bad parameters are refused", "validate raises TypeError")
class RaisesTypeErrors:
    def validate(self, params):
        if (params.extra_args or {})["counting"]["rate"] < 0:
            raise ValueError("below 0")


@fault(Counting, "unused stage costs nothing", "called")
class WantsEverybody:
    def wants(self, params):
        return True


@fault(NotTwice, "argmax", "keep argmax and does not")
class SaysThatTheBestTokenStays:
    spec = NotTwice.spec.__class__(
        "not_twice",
        kind="mask",
        fields=NotTwice.spec.fields,
        caps=Capabilities(keeps=EVERY_WORD | {"argmax"}),
        extra_args=("rate",),
    )


@fault(Floor, "argmax", "keep argmax and does not")
class CutsTheBest:
    def bounds(self, logits, rows, lo, hi):
        cut = self.depth.dev[rows.req_idx] < torch.inf
        return lo, torch.where(cut, torch.minimum(hi, logits.amax(-1) - 0.1), hi)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_by_the_check_that_is_there_for_it(name):
    bad, check, text = FAULTS[name]
    sound = SOUND[bad.spec.name]
    case = StageCase(bad, sound.wanting, sound.plain)
    (own,) = [one for one in CHECKS if name_of(one) == check]  # the others may fail or not: a fault has many sides
    outcome = run_check(own, case)
    assert outcome.result == "failed", outcome
    assert outcome.reason.startswith(f"{bad.spec.name}: ") and text in outcome.reason


def test_memory_as_wide_as_the_vocabulary_is_sized_for_the_bench():
    from framework.testing.stages import VOCAB_SIZE, context

    ctx = context(Counting.spec)
    assert Counting.spec.fields[1].width == PER_TOKEN
    assert ctx.column("counts").take(1).shape == (VOCAB_SIZE,)
