"""Stage `xtc`: now and then cuts off the most likely tokens, all but the least likely of those above a threshold."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.rng import random_bits, row_key
from framework.sampling.interval import inside
from framework_samplers.options import XtcConfig
from framework_samplers.own_args import number, own
from framework_samplers.surprise import moments
from framework_samplers.words import last_ids


class Xtc:
    """Exclude top choices: hi becomes the least logit with p >= threshold, with the given probability at each token.

    Parameters of a request: `threshold` in [0, 1], default 0.1; `probability` in [0, 1], default 0.5, 0 is off. p is
    that of the incoming interval. At least two tokens above the threshold are needed for anything to change, so one
    above 0.5 never does; equals of the least one stay. The draw is a function of seed and position, and its stream is
    the stage's own. Source: github.com/oobabooga/text-generation-webui, pull request 6335.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "xtc",
        kind="threshold",
        fields=(Field("log_threshold", "float32"), Field("probability", "float32")),
        params=("seed",),
        caps=Capabilities(
            keeps=frozenset({"kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("threshold", "probability"),
    )

    def __init__(self, options: XtcConfig, ctx: StageContext):
        self._log_threshold, self._probability = ctx.column("log_threshold"), ctx.column("probability")
        self._stream = ctx.stream
        ids = {*ctx.eos_token_ids, *last_ids("protected", options.protected, ctx)}
        self._protected = torch.tensor(sorted(ids), dtype=torch.int64, device=ctx.device)

    def wants(self, params: SamplingParams) -> bool:
        return "xtc" in (params.extra_args or {}) and _probability(params) > 0

    def validate(self, params: SamplingParams) -> None:
        number("extra_args.xtc.threshold", _threshold(params), 0.0, 1.0)
        number("extra_args.xtc.probability", _probability(params), 0.0, 1.0)

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        threshold = float(_threshold(params))
        self._log_threshold.np[req_idx] = math.log(threshold) if threshold > 0 else -math.inf
        self._probability.np[req_idx] = _probability(params)

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        kept = moments(logits, lo, hi)
        floor = (kept.top + kept.log_sum + self._log_threshold.dev[rows.req_idx]).float()
        cut = self._least_above(logits, torch.maximum(lo, floor), hi)
        is_cut = self._is_drawn(rows) & ~self._hits_protected(inside(logits, lo, hi), cut)
        return lo, torch.where(is_cut, torch.minimum(hi, cut), hi)

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""

    def _least_above(self, logits: Tensor, floor: Tensor, hi: Tensor) -> Tensor:
        """[L] least logit of floor..hi, inf where there is none."""
        is_above = (logits >= floor.unsqueeze(1)) & (logits <= hi.unsqueeze(1)) & (logits > -torch.inf)
        return torch.where(is_above, logits, torch.inf).amin(-1)

    def _is_drawn(self, rows: Rows) -> Tensor:
        bits = random_bits(row_key(rows.seed, rows.position, self._stream, 0), torch.zeros_like(rows.seed))
        return (bits.double() + 0.5) * 2.0**-32 < self._probability.dev[rows.req_idx]

    def _hits_protected(self, kept: Tensor, cut: Tensor) -> Tensor:
        return (kept.index_select(1, self._protected) > cut.unsqueeze(1)).any(-1)


def _threshold(params: SamplingParams) -> Any:
    return own(params, "xtc").get("threshold", 0.1)


def _probability(params: SamplingParams) -> Any:
    return own(params, "xtc").get("probability", 0.5)
