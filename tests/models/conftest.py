"""A plain backend and plain attention for model tests: everything in torch, nothing paged, one sequence a forward."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from framework.interfaces import ForwardContext, ModelContext
from framework.layers import ops
from framework.layers.experts import ReferenceExperts


class PlainBackend:
    """What a model asks of a backend: dense products and elementwise operations."""

    device = torch.device("cpu")
    layer_ops = ops

    def pack_linear(self, weight, bias=None):
        return lambda x: functional.linear(x, weight, bias)

    def pack_experts(self, weights, routing):
        return ReferenceExperts(weights, routing)


class FullAttention:
    """A plan for one whole sequence: causal softmax over its tokens, in float32, with what layers ask for beside it."""

    def __init__(self, layers):
        self.layers = layers

    def forward(self, layer, q, k, v):
        spec = self.layers[layer]
        share = spec.num_heads // spec.num_kv_heads
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        places = torch.arange(scores.shape[-1], device=scores.device)
        apart = places[:, None] - places
        hidden = apart < 0
        if spec.window is not None:
            hidden |= apart >= spec.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if spec.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = spec.sinks.float()[:, None, None].expand(-1, scores.shape[-2], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(0, 1)

    def forward_latent(self, layer, q, latent, up):
        """Every key and value expanded."""
        rank = self.layers[layer].value_dim
        keys = torch.einsum("hnr,tr->htn", up.keys.float(), latent[:, :rank].float())
        keys = torch.cat((keys, latent[:, rank:].float().expand(len(keys), -1, -1)), -1)
        values = torch.einsum("hvr,tr->htv", up.values.float(), latent[:, :rank].float())
        scores = q.transpose(0, 1).float() @ keys.transpose(1, 2) * self.layers[layer].scale
        places = torch.arange(scores.shape[-1], device=scores.device)
        apart = places[:, None] - places
        return (scores.masked_fill(apart < 0, float("-inf")).softmax(-1) @ values).transpose(0, 1)


def build(target, config, weights, *, dtype=torch.float32, max_model_len=64):
    """A model over `weights`, and a function ids -> logits [T, V] of one whole sequence."""
    ctx = ModelContext(PlainBackend(), weights, dtype, torch.device("cpu"), max_model_len)
    model = target(config, ctx)
    plans = [FullAttention(ctx.layers)] * len(ctx.layers)

    def run(ids, feature_layers=(), wanted=None):
        positions = torch.arange(len(ids))
        return model.forward(model.embed(ids), positions, ForwardContext(plans, feature_layers, wanted=wanted))

    def logits(ids):
        return model.compute_logits(run(ids).hidden)

    return SimpleNamespace(model=model, ctx=ctx, run=run, logits=logits, plans=plans)


@pytest.fixture
def build_model():
    return build
