"""Mixtures of experts on the CPU: each expert multiplies the rows of its tokens at once, with a packed product.

The host reads which experts a step has hit, which costs nothing here: an eager step of exact shapes. Routing is that of
`framework.layers.experts`. Called by `cpu.CpuBackend.pack_experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from framework.interfaces import ExpertWeights, Linear, Routing
from framework.layers.experts import activate, count_tokens, route

PackLinear = Callable[[Tensor, Tensor | None], Linear]


class CpuExperts:
    """`interfaces.Experts` of one layer. A token's bits depend on the others only where those of its products do.

    pack_linear   of the backend; it packs 2 E weights
    silu_and_mul  of the backend
    """

    __slots__ = ("_activate", "_down", "_gate_up", "_routing", "counts")

    def __init__(
        self,
        weights: ExpertWeights,
        routing: Routing,
        pack_linear: PackLinear,
        silu_and_mul: Callable[[Tensor], Tensor],
    ) -> None:
        self._gate_up = list(_packed(weights.gate_up, weights.gate_up_bias, pack_linear))
        self._down = list(_packed(weights.down, weights.down_bias, pack_linear))
        self._activate = silu_and_mul if weights.activation == "silu" else _clamped(weights.limit)
        self._routing = routing
        self.counts = torch.zeros(len(weights.down), dtype=torch.int64)

    def __call__(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """As `interfaces.Experts`."""
        ids, shares = route(logits, self._routing)
        count_tokens(self.counts, ids, num_tokens)
        outputs = self._of_one(x, ids) if len(x) == 1 else self._of_many(x, ids)
        return _combine(outputs, shares, x.dtype)

    def _of_one(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        """k outputs [1, H] of the experts in ids [1, k]: nothing has to be sorted."""
        return [self._feed_forward(expert, x) for expert in ids[0].tolist()]

    def _of_many(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        """k outputs [T, H]: those of each token's first expert, of its second, and so on.

        Rows of one expert stand together in `order`; each choice of a token has a place [k, T] of its own in what comes
        out, so that the sum over them has the order of choice whatever the experts were.
        """
        num_tokens, k = ids.shape
        chosen = ids.t().flatten()
        order, sizes = chosen.argsort(stable=True), torch.bincount(chosen, minlength=len(self._down)).tolist()
        tokens = order % max(num_tokens, 1)
        outputs, begin = x.new_empty((k * num_tokens, x.shape[1])), 0
        for expert, size in enumerate(sizes):
            if size:
                rows = slice(begin, begin + size)
                outputs.index_copy_(0, order[rows], self._feed_forward(expert, x.index_select(0, tokens[rows])))
                begin += size
        return list(outputs.view(k, num_tokens, x.shape[1]))

    def _feed_forward(self, expert: int, x: Tensor) -> Tensor:
        return self._down[expert](self._activate(self._gate_up[expert](x)))


def _packed(weights: Tensor, biases: Tensor | None, pack_linear: PackLinear) -> Iterator[Linear]:
    """weights [E, out, in], biases [E, out] -> a product each."""
    for expert, weight in enumerate(weights):
        yield pack_linear(weight, None if biases is None else biases[expert])


def _clamped(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: activate(gate_up, "clamped", limit)


def _combine(outputs: list[Tensor], shares: Tensor, dtype: torch.dtype) -> Tensor:
    """`framework.layers.experts.combine`, bit for bit, in fewer allocations."""
    total = outputs[0].float().mul(shares[:, :1])
    for choice, output in enumerate(outputs[1:], 1):
        total.add_(output.float().mul(shares[:, choice : choice + 1]))
    return total.to(dtype)
