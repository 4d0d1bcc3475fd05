"""The two ends of a decoder: token ids to vectors, and vectors to logits, which may share one matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import CheckpointError
from framework.interfaces import ModelContext


class Embedding:
    """Rows of `name.weight` [vocab_size, hidden_size], looked up by token id.

    scale  factor of what is looked up, not of the weight, which a head may share; it is rounded to the model's dtype
    """

    __slots__ = ("_scale", "weight")

    def __init__(
        self, ctx: ModelContext, name: str, vocab_size: int, hidden_size: int, *, scale: float | None = None
    ) -> None:
        self.weight = ctx.weights.take(f"{name}.weight", (vocab_size, hidden_size))
        self._scale = None if scale is None else _rounded(scale, ctx.dtype)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        found = functional.embedding(input_ids, self.weight)
        return found if self._scale is None else found * self._scale


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))  # wherever the model is built


class PositionEmbedding:
    """A learnt vector for each position: `name.weight` [num_positions, hidden_size].

    Raises CheckpointError where max_model_len is beyond them.
    """

    __slots__ = ("weight",)

    def __init__(self, ctx: ModelContext, name: str, num_positions: int, hidden_size: int) -> None:
        if ctx.max_model_len > num_positions:
            raise CheckpointError(
                f"{name}.weight has {num_positions} positions, but max_model_len is {ctx.max_model_len}. "
                f"Use at most engine.max_model_len={num_positions}."
            )
        self.weight = ctx.weights.take(f"{name}.weight", (num_positions, hidden_size))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden_size], positions [T] -> x with their vectors added."""
        return x + self.weight.index_select(0, positions)


class LMHead:
    """[L, hidden_size] -> [L, vocab_size]: a matrix of its own, or the embedding's when the two are tied.

    A checkpoint that declares itself tied and yet brings a head is served with that head: the file is the truth.

    soft_cap  c: logits s become c * tanh(s / c)
    """

    __slots__ = ("_cap", "_product", "_soft_cap")

    def __init__(
        self, ctx: ModelContext, name: str, embedding: Embedding, *, tied: bool, soft_cap: float | None = None
    ) -> None:
        weight = embedding.weight
        if not tied or ctx.weights.has(f"{name}.weight"):
            weight = ctx.weights.take(f"{name}.weight", tuple(embedding.weight.shape))
        self._product = ctx.backend.pack_linear(weight)
        self._cap, self._soft_cap = soft_cap, ctx.backend.layer_ops.soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._product(hidden)
        return logits if self._cap is None else self._soft_cap(logits, self._cap)
