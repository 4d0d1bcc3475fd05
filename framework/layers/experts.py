"""Torch reference of a mixture of experts (`interfaces.Experts`): what routing and the weighted sum mean, exactly.

A backend brings faster versions (`Backend.pack_experts`), which are tested against this one; `route` is also what they
call where a device has nothing faster. The block around it, router product included, is `framework.layers.moe`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from framework.interfaces import ExpertWeights, Routing

CLAMPED_GAIN = 1.702
"""Of the clamped activation: sigmoid(1.702 x) is near the normal distribution function."""


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Experts of each token in the order of their choice, and their weights.

    logits  [T, E], counted in float32
    returns ids [T, k] int64, best first and of equal scores the lower id; weights [T, k] float32
    Sources: Mixtral (arXiv 2401.04088), section 2.1; DeepSeek-V2 (2405.04434), section 2.2.2; DeepSeek-V3 (2412.19437),
    section 2.1.2; gpt-oss for "selected".
    """
    scores = _scores(logits.float(), routing)
    wanted = scores if routing.bias is None else scores + routing.bias
    ids = _largest(_within_groups(wanted, routing), routing.k)
    weights = scores.gather(1, ids)  # without the bias, which is for the choice alone
    if routing.scores == "selected":
        weights = weights.softmax(-1)
    if routing.normalizes:
        weights = weights / (weights.cumsum(-1)[:, -1:] + 1e-20)  # summed one behind the other, for any number of rows
    return ids, weights * routing.scale


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scores == "selected":
        return logits
    return logits.softmax(-1) if routing.scores == "softmax" else sigmoid(logits)


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
    """scores [T, E] with -inf for experts of groups that are not chosen: 0 would beat a score that is below it."""
    if routing.num_chosen_groups == routing.num_groups:
        return scores
    grouped = scores.unflatten(1, (routing.num_groups, -1))
    best = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best).scatter(1, _largest(best, routing.num_chosen_groups), 1.0)
    return grouped.masked_fill(chosen.unsqueeze(-1) == 0, float("-inf")).flatten(1)


def _largest(scores: Tensor, k: int) -> Tensor:
    """[T, k] places of the largest scores [T, n], largest first; topk promises no order of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): torch's own counts the last few elements of a thread's share otherwise than the rest."""
    return 1 / (torch.exp(-x) + 1)


def activate(gate_up: Tensor, activation: str, limit: float) -> Tensor:
    """[..., 2 I] -> [..., I] as `interfaces.ExpertWeights` says, counted in float32 and rounded to gate_up's dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        return (gate * sigmoid(gate) * up).to(gate_up.dtype)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * sigmoid(CLAMPED_GAIN * gate)).to(gate_up.dtype)


def combine(outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over the choices of each token in their order, counted in float32.

    outputs [T, k, H] of each token's experts; weights [T, k] float32 -> [T, H] in dtype.
    """
    total = outputs[:, 0].float() * weights[:, :1]
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice].float() * weights[:, choice : choice + 1]
    return total.to(dtype)


def count_tokens(counts: Tensor, ids: Tensor, num_tokens: Tensor | None) -> None:
    """Adds to counts [E] int64 how often each expert stands in ids [T, k] of the first num_tokens [1] tokens."""
    if num_tokens is None:
        real = torch.ones_like(ids)
    else:
        tokens = torch.arange(ids.shape[0], device=ids.device)[:, None]
        real = (tokens < num_tokens).expand_as(ids).long()
    counts.index_add_(0, ids.flatten(), real.flatten())


class ReferenceExperts:
    """`interfaces.Experts` by its definition: every expert computes every token, and a token keeps those it chose.

    Costs E / k times what it has to. Has no branch on values, so that it can be exported.
    """

    __slots__ = ("_routing", "_weights", "counts")

    def __init__(self, weights: ExpertWeights, routing: Routing) -> None:
        self._weights, self._routing = weights, routing
        self.counts = torch.zeros(len(weights.down), dtype=torch.int64, device=weights.down.device)

    def __call__(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """As `interfaces.Experts`."""
        ids, weights = route(logits, self._routing)
        count_tokens(self.counts, ids, num_tokens)
        outputs = x.new_zeros((*ids.shape, x.shape[1]))
        for expert in range(len(self.counts)):
            chosen = (ids == expert).unsqueeze(-1)
            outputs = torch.where(chosen, self._feed_forward(expert, x).unsqueeze(1), outputs)
        return combine(outputs, weights, x.dtype)

    def _feed_forward(self, expert: int, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] of one expert. Both products are rounded to x's dtype."""
        w = self._weights
        up_bias = None if w.gate_up_bias is None else w.gate_up_bias[expert]
        down_bias = None if w.down_bias is None else w.down_bias[expert]
        hidden = activate(functional.linear(x, w.gate_up[expert], up_bias), w.activation, w.limit)
        return functional.linear(hidden, w.down[expert], down_bias)
