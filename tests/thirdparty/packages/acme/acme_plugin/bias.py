"""Adds a configured bias to configured tokens; a request scales it with extra_args={"acme_bias": {"scale": 2.0}}."""

import math

import torch

from framework.batch import Field
from framework.interfaces import Capabilities, StageSpec


class AcmeBias:
    """logits[ids] += bias * scale. A row with scale 0 is left as it is, bit for bit."""

    spec = StageSpec(
        "acme_bias",
        kind="elementwise",
        fields=(Field("scale", "float32", init=0.0),),
        caps=Capabilities(keeps=frozenset({"async", "drafts", "graph_safe", "batch_invariant", "deterministic"})),
        extra_args=("scale",),
    )

    def __init__(self, config, ctx):
        outside = [i for i in config.token_ids if not 0 <= i < ctx.vocab_size]
        if outside:
            raise ValueError(
                f"acme_bias.token_ids: {outside[0]} is outside of the vocabulary of {ctx.vocab_size} tokens"
            )
        self.bias = config.bias
        self.ids = torch.tensor(config.token_ids, dtype=torch.int64, device=ctx.device)
        self.scale = ctx.column("scale")

    def wants(self, params):
        return _scale(params) != 0

    def validate(self, params):
        _scale(params)

    def add_request(self, req_idx, params, request):
        self.scale.np[req_idx] = _scale(params)

    def apply(self, logits, rows):
        scale = self.scale.dev[rows.req_idx].unsqueeze(1)
        chosen = logits[:, self.ids]
        logits[:, self.ids] = torch.where(scale == 0, chosen, chosen + self.bias * scale)

    def commit(self, rows, sampled, num_valid):
        pass  # the stage keeps no state between tokens


def _scale(params):
    scale = (params.extra_args or {}).get("acme_bias", {}).get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"extra_args.acme_bias.scale must be a finite number, got {scale!r}")
    return scale
