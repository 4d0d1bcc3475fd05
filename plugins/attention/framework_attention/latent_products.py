"""The two forms of latent attention as products: absorbed over latents as they lie, and expanded in pieces.

Nothing here knows requests: `mla_torch` gathers latents, and says which of them each query reads. Softmax and sums of
pieces count in float32, or in float64 for float64 inputs. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and
appendix C for the absorption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from framework.interfaces import LatentUp
from framework_attention.products import Scoring, Scratch


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which a softmax over products of this dtype counts."""
    return torch.promote_types(dtype, torch.float32)


def absorb(q: Tensor, up: LatentUp) -> Tensor:
    """Queries [n, H, nope + rope] -> [n, H, rank + rope], which meet latents as keys that all heads share."""
    num_nope = up.keys.shape[1]
    through = torch.bmm(q[..., :num_nope].transpose(0, 1), up.keys)
    return torch.cat((through.transpose(0, 1), q[..., num_nope:]), dim=-1)


def release(attended: Tensor, up: LatentUp) -> Tensor:
    """Weighted sums of latents [n, H, rank] -> outputs [n, H, value]."""
    return torch.bmm(attended.transpose(0, 1), up.values.transpose(1, 2)).transpose(0, 1)


class Absorbed:
    """Attention of absorbed queries over latents that every head reads: two products over the whole context.

    mask  [n, t, 1, L] float32, 0 where a query may read a latent and -inf elsewhere; no row is -inf throughout
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype, heads: int, rank: int, scratch: Scratch) -> None:
        requests, queries, _, length = mask.shape
        self._mask, self._rank = mask, rank
        sizes = (requests, queries * heads, length)
        self._scores = scratch.take("scores", dtype, *sizes)
        self._weights = scratch.take("scores", wide(dtype), *sizes)
        by_query = (requests, queries, heads, length)
        self._scores_by_query, self._weights_by_query = self._scores.view(by_query), self._weights.view(by_query)

    def __call__(self, q: Tensor, latents: Tensor, scoring: Scoring) -> Tensor:
        """q [n * t, H, rank + rope] -> [n * t, H, rank].

        latents  [n, L, rank + rope]; positions without a token hold finite values
        """
        torch.bmm(q.view(len(self._scores), -1, q.shape[-1]), latents.transpose(1, 2), out=self._scores)
        torch.add(self._mask, self._scores_by_query, alpha=scoring.scale, out=self._weights_by_query)
        torch.softmax(self._weights, dim=-1, out=self._weights)
        if self._scores.dtype != self._weights.dtype:
            self._scores.copy_(self._weights)
        return torch.bmm(self._scores, latents[..., : self._rank]).view(*q.shape[:2], -1)


class Partial(NamedTuple):
    """What some of the keys give to each query: out [H, t, value] normalised over them, and lse [H, t], the natural
    logarithm of the sum of their exponentiated scores; -inf, and out 0, of no key at all. Both in the `wide` dtype."""

    out: Tensor
    lse: Tensor

    @classmethod
    def nothing(cls, like: Tensor, *shape: int) -> Partial:
        """Of no key: shape [H, t, value]."""
        dtype = wide(like.dtype)
        return cls(like.new_zeros(shape, dtype=dtype), like.new_full(shape[:-1], float("-inf"), dtype=dtype))


def expand(latents: Tensor, up: LatentUp, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Keys [H, L, nope + rope] and values [H, L, value] of latents [L, rank + rope], valid until the next call."""
    (heads, num_nope, rank), length = up.keys.shape, len(latents)
    compressed = latents[:, :rank]
    keys = scratch.take("keys", latents.dtype, heads, length, num_nope + latents.shape[1] - rank)
    of_heads = functional.linear(compressed, up.keys.flatten(0, 1)).view(length, heads, num_nope)
    keys[..., :num_nope].copy_(of_heads.transpose(0, 1))
    keys[..., num_nope:].copy_(latents[:, rank:])
    return keys, functional.linear(compressed, up.values.flatten(0, 1)).view(length, heads, -1).transpose(0, 1)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Partial:
    """Attention of q [H, t, D] over keys [H, L, D] and values [H, L, value] alone.

    mask  [t, L] of 0 and -inf; a row of -inf throughout, like L = 0, is a query that reads none of them
    """
    if not keys.shape[1]:
        return Partial.nothing(q, *q.shape[:2], values.shape[-1])
    scores = torch.bmm(q, keys.transpose(1, 2)).to(wide(q.dtype)).mul_(scale)
    if mask is not None:
        scores.add_(mask)
    # Clamped, so that a row without a key subtracts a number: -inf from -inf is none.
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    out = torch.bmm(scores.to(values.dtype), values).to(scores.dtype)
    return Partial(out.div_(total.clamp(min=torch.finfo(scores.dtype).tiny)), (top + total.log()).squeeze(-1))


def merge_into(sums: Partial, part: Partial) -> None:
    """Adds to the sums what further keys give. Pieces without a key weigh nothing, in any order.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i).
    """
    lse = torch.logaddexp(sums.lse, part.lse)
    least = lse.clamp(min=torch.finfo(lse.dtype).min)  # as in `attend`
    before, now = (sums.lse - least).exp_(), (part.lse - least).exp_()
    sums.out.mul_(before.unsqueeze(-1)).addcmul_(part.out, now.unsqueeze(-1))
    sums.lse.copy_(lse)


def causal_mask(num_queries: int, num_keys: int, ahead: int, dtype: torch.dtype) -> Tensor:
    """[num_queries, num_keys]: 0 where key j <= query i + ahead, -inf elsewhere."""
    return torch.full((num_queries, num_keys), float("-inf"), dtype=dtype).triu_(ahead + 1)


def cut(length: int, step: int) -> Sequence[tuple[int, int]]:
    """(begin, end) of the pieces of 0 .. length, each of `step` but for the last."""
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]
