"""The two ends of a decoder: token ids to vectors, and vectors to logits, which may share one matrix."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from framework.interfaces import ModelContext


class Embedding:
    """Rows of `name.weight` [vocab_size, hidden_size], looked up by token id."""

    __slots__ = ("weight",)

    def __init__(self, ctx: ModelContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self.weight = ctx.weights.take(f"{name}.weight", (vocab_size, hidden_size))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        return functional.embedding(input_ids, self.weight)


class LMHead:
    """[L, hidden_size] -> [L, vocab_size]: a matrix of its own, or the embedding's when the two are tied.

    A checkpoint that declares itself tied and yet brings a head is served with that head: the file is the truth.
    """

    __slots__ = ("_product",)

    def __init__(self, ctx: ModelContext, name: str, embedding: Embedding, *, tied: bool) -> None:
        weight = embedding.weight
        if not tied or ctx.weights.has(f"{name}.weight"):
            weight = ctx.weights.take(f"{name}.weight", tuple(embedding.weight.shape))
        self._product = ctx.backend.pack_linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._product(hidden)
