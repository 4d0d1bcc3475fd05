"""Stage `mirostat`: a select stage that steers the surprise of what it draws towards a target."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.draw import draw
from framework_samplers.options import MirostatConfig
from framework_samplers.own_args import number, own
from framework_samplers.surprise import moments

BITS = 1 / math.log(2)
RING = 8
"""Positions whose mu is kept: more than the steps in flight that a preemption may leave uncounted."""


class Mirostat:
    """Mirostat 2.0: draws from the tokens whose surprise -log2 p is at most mu, and then mu -= eta * (surprise - tau).

    mu begins at 2 tau. p of the bound is that of the incoming interval, in which the best token always stays; the
    surprise that mu learns from is that of the token among those it was drawn from, as in the source. The draw is that
    of stage `gumbel`: a function of seed, position and logits. Parameters of a request: `tau` in (0, 100], `eta` in
    [0, 1]. Mu depends on the tokens before, so there are no draft rows with it: it does not keep `drafts`.
    Source: arXiv 2007.14966; version 2 as `llama_sampler_mirostat_v2` of llama.cpp.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "mirostat",
        kind="select",
        fields=(
            Field("mu", "float32", width=RING, lasting=True),  # mu of position p stands at p modulo RING
            Field("tau", "float32"),
            Field("eta", "float32"),
            Field("surprise", "float32"),
        ),
        params=("seed",),
        caps=Capabilities(keeps=frozenset({"kept_set", "async", "graph_safe", "batch_invariant", "deterministic"})),
        extra_args=("tau", "eta"),
    )

    def __init__(self, options: MirostatConfig, ctx: StageContext):
        _check("options", options.tau, options.eta)
        self._options = options
        self._mu, self._tau, self._eta = ctx.column("mu"), ctx.column("tau"), ctx.column("eta")
        self._surprise = ctx.column("surprise")

    def wants(self, params: SamplingParams) -> bool:
        return not params.is_greedy

    def validate(self, params: SamplingParams) -> None:
        _check("extra_args.mirostat", *self._asked(params))

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        tau, eta = self._asked(params)
        self._tau.np[req_idx], self._eta.np[req_idx], self._mu.np[req_idx] = tau, eta, 2 * tau
        self._surprise.np[req_idx] = tau

    def select(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> Tensor:
        kept = moments(logits, lo, hi)
        mu = self._mu.dev[rows.req_idx, rows.position % RING]
        least = kept.top + kept.log_sum - mu / BITS
        floor = torch.maximum(lo, torch.minimum(kept.top, least.float()))
        ids = draw(logits, rows.seed, rows.position, floor, hi)
        # Of use to the commit of this very step only: the next select writes it anew.
        self._surprise.dev[rows.req_idx] = self._surprise_of(ids, logits, floor, hi)
        return ids

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        at, place = rows.req_idx, rows.position % RING
        error = self._surprise.dev[at] - self._tau.dev[at]
        self._mu.dev[at, (place + 1) % RING] = self._mu.dev[at, place] - self._eta.dev[at] * error

    def _surprise_of(self, ids: Tensor, logits: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        drawn_from = moments(logits, lo, hi)
        below_top = drawn_from.top - logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        return ((drawn_from.log_sum + below_top) * BITS).float()

    def _asked(self, params: SamplingParams) -> tuple[Any, Any]:
        given = own(params, "mirostat")
        return given.get("tau", self._options.tau), given.get("eta", self._options.eta)


def _check(where: str, tau: Any, eta: Any) -> None:
    number(f"{where}.tau", tau, 0.0, 100.0, "(]")
    number(f"{where}.eta", eta, 0.0, 1.0)
