"""Tokens that tire: each listed one that is drawn makes all of them less likely, and they recover as others come.

A request asks with extra_args={"acme_fatigue": {"strength": 2.0}}. Unlike `acme_bias` it keeps state between tokens.
"""

import math

import numpy as np
import torch

from framework.batch import Field
from framework.interfaces import Capabilities, StageSpec


class AcmeFatigue:
    """logits[ids] -= strength * tired; with each token tired = tired / 2 + [the token is one of ids]."""

    spec = StageSpec(
        "acme_fatigue",
        kind="elementwise",
        fields=(Field("strength", "float32"), Field("tired", "float32")),
        caps=Capabilities(keeps=frozenset({"async", "kept_set", "graph_safe", "batch_invariant", "deterministic"})),
        extra_args=("strength",),
    )

    def __init__(self, config, ctx):
        self.ids = torch.tensor(config.token_ids, dtype=torch.int64, device=ctx.device)
        self.strength, self.tired = ctx.column("strength"), ctx.column("tired")

    def wants(self, params):
        return _strength(params) != 0

    def validate(self, params):
        _strength(params)

    def add_request(self, req_idx, params, request):
        """A request that returns after a preemption brings the tokens that tired it."""
        tired = np.float32(0)
        for token in request.token_ids[request.num_prompt_tokens :]:
            tired = tired / 2 + np.float32(int(token) in self.ids)
        self.strength.np[req_idx], self.tired.np[req_idx] = _strength(params), tired

    def apply(self, logits, rows):
        loss = self.strength.dev[rows.req_idx] * self.tired.dev[rows.req_idx]
        logits[:, self.ids] -= loss.unsqueeze(1)

    def commit(self, rows, sampled, num_valid):
        tired = self.tired.dev[rows.req_idx]
        after = tired / 2 + torch.isin(sampled[:, 0], self.ids)
        self.tired.dev[rows.req_idx] = torch.where(num_valid > 0, after, tired)


def _strength(params):
    strength = (params.extra_args or {}).get("acme_fatigue", {}).get("strength", 0.0)
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not math.isfinite(strength):
        raise ValueError(f"extra_args.acme_fatigue.strength must be a finite number, got {strength!r}")
    return strength
