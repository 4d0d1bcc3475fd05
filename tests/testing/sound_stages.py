"""Five small stages that keep the contract, each with state of another sort. Faults are planted in them."""

from __future__ import annotations

import torch

from framework.batch import PER_TOKEN, Field
from framework.interfaces import Capabilities, StageSpec
from framework.request import SamplingParams
from framework.sampling.draw import draw
from framework.sampling.history import drafts_before, last_tokens, taken

EVERY_WORD = frozenset({"kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})


def rate_of(params, name):
    rate = (params.extra_args or {}).get(name, {}).get("rate", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 10:
        raise ValueError(f"extra_args.{name}.rate must be a number in [0, 10], got {rate!r}")
    return float(rate)


def paying(name, *rates):
    return tuple(SamplingParams(extra_args={name: {"rate": rate}}) for rate in rates)


class Counting:
    """logits -= rate * how often the token stands in the output; counts in a pool, drafts counted on the fly."""

    spec = StageSpec(
        "counting",
        kind="elementwise",
        fields=(Field("rate", "float32"), Field("counts", "int32", width=PER_TOKEN, pooled=True)),
        caps=Capabilities(keeps=EVERY_WORD),
        extra_args=("rate",),
    )

    def __init__(self, options, ctx):
        self.rate, self.counts, self.token_ids = ctx.column("rate"), ctx.column("counts"), ctx.token_ids

    def wants(self, params):
        return rate_of(params, self.spec.name) > 0

    def validate(self, params):
        rate_of(params, self.spec.name)

    def add_request(self, req_idx, params, request):
        self.rate.np[req_idx] = rate_of(params, self.spec.name)
        counts = self.counts.take(req_idx)
        for token in request.token_ids[request.num_prompt_tokens :].tolist():
            counts[token] += 1

    def apply(self, logits, rows):
        counts = self.counts.dev[self.counts.slot[rows.req_idx].long()].float()
        drafts = drafts_before(self.token_ids, rows).long()
        counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).float())
        logits.sub_(self.rate.dev[rows.req_idx].unsqueeze(1) * counts)

    def commit(self, rows, sampled, num_valid):
        token, was_taken = taken(rows, sampled, num_valid)
        slot = self.counts.slot[rows.req_idx].long()
        self.counts.dev.index_put_((slot, token), (was_taken & (slot > 0)).int(), accumulate=True)


class NotTwice:
    """Masks the token that came last; its history is `token_ids`."""

    spec = StageSpec(
        "not_twice",
        kind="mask",
        fields=(Field("is_on", "bool"),),
        caps=Capabilities(keeps=EVERY_WORD),
        extra_args=("rate",),
    )

    def __init__(self, options, ctx):
        self.is_on, self.token_ids = ctx.column("is_on"), ctx.token_ids

    def wants(self, params):
        return rate_of(params, self.spec.name) > 0

    def validate(self, params):
        rate_of(params, self.spec.name)

    def add_request(self, req_idx, params, request):
        self.is_on.np[req_idx] = True

    def apply(self, logits, rows):
        last = last_tokens(self.token_ids, rows, 1).long().clamp(min=0)
        bound = torch.where(self.is_on.dev[rows.req_idx].unsqueeze(1), -torch.inf, torch.inf)
        logits.scatter_reduce_(1, last, bound, "amin")

    def commit(self, rows, sampled, num_valid):
        pass  # the history is the runner's


class Draws:
    """The select stage that draws by seed and position."""

    spec = StageSpec("draws", kind="select", caps=Capabilities(keeps=EVERY_WORD))

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return not params.is_greedy

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def select(self, logits, rows, lo, hi):
        return draw(logits, rows.seed, rows.position, lo, hi)

    def commit(self, rows, sampled, num_valid):
        pass


class Floor:
    """Keeps what is at most `rate` below the best token."""

    spec = StageSpec(
        "floor",
        kind="threshold",
        fields=(Field("depth", "float32", init=torch.inf),),
        caps=Capabilities(keeps=EVERY_WORD | {"argmax"}),
        extra_args=("rate",),
    )

    def __init__(self, options, ctx):
        self.depth = ctx.column("depth")

    def wants(self, params):
        return rate_of(params, self.spec.name) > 0

    def validate(self, params):
        rate_of(params, self.spec.name)

    def add_request(self, req_idx, params, request):
        self.depth.np[req_idx] = rate_of(params, self.spec.name)

    def bounds(self, logits, rows, lo, hi):
        top = logits.where(logits <= hi.unsqueeze(1), -torch.inf).amax(-1)
        return torch.maximum(lo, top - self.depth.dev[rows.req_idx]), hi

    def commit(self, rows, sampled, num_valid):
        pass


class Telling:
    """Tells each request its best token, and what it asked with."""

    spec = StageSpec(
        "telling",
        kind="observe",
        fields=(Field("rate", "float32"),),
        caps=Capabilities(keeps=EVERY_WORD | {"argmax"}),
        extra_args=("rate",),
        tells_requests=True,
    )

    def __init__(self, options, ctx):
        self.rate = ctx.column("rate")

    def wants(self, params):
        return rate_of(params, self.spec.name) > 0

    def validate(self, params):
        rate_of(params, self.spec.name)

    def add_request(self, req_idx, params, request):
        self.rate.np[req_idx] = rate_of(params, self.spec.name)

    def observe(self, raw_logits, logits, rows, ids):
        return ids, raw_logits.amax(-1), self.rate.dev[rows.req_idx]

    def collect(self, payload):
        ids, top, rate = payload
        return [{"id": i, "top": t, "rate": r} for i, t, r in zip(ids.tolist(), top, rate.numpy(), strict=True)]

    def commit(self, rows, sampled, num_valid):
        pass
