"""What stands in the place of transformers' attention: a function that its attention interface calls by name.

The function is one for the whole process and keeps nothing: what it calls lies on the attention module itself, first a
`Recorder` while a model is tried out, then a `PagedLayer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from framework.errors import CheckpointError
from framework.interfaces import ForwardContext

PAGED = "framework_paged"
"""Name of the function in transformers' attention interface. It has no masks there, so none are made."""
TRIED = "framework_tried"
"""Name of the same function with masks, which tell the pattern of each layer."""
_SLOT = "framework_attention"


def register() -> None:
    """Makes both names known to transformers; any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(TRIED, _attend)
    AttentionMaskInterface.register(TRIED, _mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hk, T, D or another] -> [1, T, Hq, D of the values]."""
    given = Call(module, query[0], key[0], value[0], attention_mask, scaling, more)
    return getattr(module, _SLOT)(given).unsqueeze(0), None


def _mask(q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: Any, **more: Any) -> Tensor:
    """[1, 1, T, T] bool, true where a query reads a key; `pattern` is the function of indices that says so."""
    rows, columns = (torch.arange(n, device=device) for n in (q_length, kv_length))
    allowed = evaluate(mask_function, rows, columns)[None, None]
    allowed.pattern = mask_function  # type: ignore[attr-defined]
    return allowed


def evaluate(pattern: Callable[..., Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns] bool of a mask function of transformers, whose arguments are indices."""
    zero = rows.new_zeros(())
    return pattern(zero, zero, rows[:, None], columns[None, :]).expand(len(rows), len(columns)).clone()


@dataclass(frozen=True)
class Call:
    """Arguments of one call: query [Hq, T, D], key [Hk, T, D], value [Hk, T, another D]; more: by keyword."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: float | None
    more: dict[str, Any]


@dataclass
class Recorder:
    """Keeps the calls of a forward pass in their order, and answers with what depends on each token alone.

    The answer holds query, key and value, so that a position or an input that a model gets wrong shows in it.
    """

    calls: list[Call] = field(default_factory=list)

    def __call__(self, given: Call) -> Tensor:
        self.calls.append(given)
        num_heads, num_kv_heads = given.query.shape[0], given.key.shape[0]
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"model=transformers: {num_heads} heads of queries are no multiple of {num_kv_heads} heads of keys. "
                "Correct config.json"
            )
        share = num_heads // num_kv_heads
        key, value = (x.repeat_interleave(share, 0) for x in (given.key, given.value))
        ramp = torch.linspace(-1, 1, key.shape[-1], device=key.device)
        own = ((given.query.float() + key.float()) * ramp).mean(-1, keepdim=True)
        return (value + own.to(value.dtype)).transpose(0, 1)

    def record(self, model: Any) -> None:
        for module in model.modules():
            setattr(module, _SLOT, self)


@dataclass
class Step:
    """The forward pass that runs: one for all layers of a model, which computes one step at a time."""

    ctx: ForwardContext | None = None


@dataclass(frozen=True)
class PagedLayer:
    """Attention of one layer by the step's plan. width: of its heads there; narrower ones are filled with zeros."""

    index: int
    width: int
    dtype: torch.dtype
    step: Step

    def __call__(self, given: Call) -> Tensor:
        assert self.step.ctx is not None, "attention outside of a forward pass"
        q, k, v = (self._packed(x) for x in (given.query, given.key, given.value))
        attended = self.step.ctx.plans[self.index].forward(self.index, q, k, v)
        return attended[..., : given.value.shape[-1]].to(given.query.dtype)

    def _packed(self, heads: Tensor) -> Tensor:
        """[H, T, D] -> [T, H, width]."""
        packed = heads.transpose(0, 1).to(self.dtype)
        if packed.shape[-1] < self.width:
            return functional.pad(packed, (0, self.width - packed.shape[-1]))
        return packed.contiguous()

    def place(self, module: Any) -> None:
        setattr(module, _SLOT, self)
