"""Reads attention layers off a model of transformers: shapes, scale, window, soft cap and sinks of each are what its
attention function is given when the model is tried out. What paged attention could not do alike is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from framework.errors import NotBuiltError
from framework.interfaces import ModelContext
from framework_models.generic.attention import Call, PagedLayer, Step, evaluate

_KNOWN = ("sliding_window", "softcap", "s_aux", "is_causal")
_INERT = (
    "position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits", "inputs_embeds", "position_embeddings",
)  # fmt: skip
"""Words that models hand through to attention and that change nothing of it."""
_NUM_ROWS = 64  # of a pattern that are looked at, beside as many at its beginning


def place_layers(calls: list[Call], ctx: ModelContext, step: Step, name: str) -> None:
    """Declares a layer a call, in their order, and puts paged attention into each module. NotBuiltError by name."""
    seen: set[int] = set()
    for call in calls:
        if id(call.module) in seen:
            raise refused(name, "attends twice in one layer")
        seen.add(id(call.module))
        _declare(call, ctx, name, step).place(call.module)


def refused(name: str, what: str) -> NotBuiltError:
    """Of an architecture that the generic path cannot serve."""
    return NotBuiltError(
        f"model=transformers: {name} {what}, which the generic path does not serve. Use a checkpoint of another "
        "architecture, or write a model plugin of this one (docs/models.md)"
    )


def _declare(call: Call, ctx: ModelContext, name: str, step: Step) -> PagedLayer:
    num_heads, num_tokens, width = call.query.shape
    if call.key.shape[1] != num_tokens:
        raise refused(name, f"attends from {tuple(call.query.shape)} to {tuple(call.key.shape)}")
    unknown = [word for word, value in call.more.items() if word not in (*_KNOWN, *_INERT) and value is not None]
    if unknown:
        raise refused(name, f"gives its attention {', '.join(unknown)}")
    window, softcap, sinks = window_of(call, ctx.max_model_len, name), call.more.get("softcap"), call.more.get("s_aux")
    head_dim = max(width, call.value.shape[-1])
    index = ctx.add_layer(
        "full" if window is None else f"sliding_{window}",
        num_heads,
        call.key.shape[0],
        head_dim,
        width**-0.5 if call.scaling is None else float(call.scaling),
        window,
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else _sinks(sinks, num_heads, ctx.dtype, name),
    )
    return PagedLayer(index, head_dim, ctx.dtype, step)


def _sinks(sinks: Tensor, num_heads: int, dtype: torch.dtype, name: str) -> Tensor:
    if sinks.numel() != num_heads:
        raise refused(name, f"has sinks of shape {tuple(sinks.shape)} for {num_heads} heads")
    return sinks.detach().reshape(num_heads).to(dtype)


def window_of(call: Call, length: int, name: str) -> int | None:
    """Readable positions of a layer, None for all of `length`: by the mask that it was given, else by its keywords.

    The pattern must be causal, or causal within a window; a window that the mask and the keywords give differently is
    refused, since one of the two is a mistake. So is a mask without a pattern, as a model makes by itself or out of the
    one that it was given: what it hides from tokens further apart than those that are tried cannot be seen in it.
    """
    said = _said(call.more, length)
    if call.mask is None:
        if not call.more.get("is_causal", getattr(call.module, "is_causal", True)):
            raise refused(name, "attends to later tokens as well")
        return said
    pattern = getattr(call.mask, "pattern", None)
    if pattern is None:
        raise refused(name, "makes masks of its own")
    found = _seen(pattern, length, name)
    if said not in (None, found):
        raise refused(name, f"has a mask of window {found} and a sliding_window of {said}")
    return found


def _said(more: Mapping[str, Any], length: int) -> int | None:
    window = more.get("sliding_window")
    return None if window is None or not 0 < window < length else int(window)


def _seen(pattern: Any, length: int, name: str) -> int | None:
    """The window of a function of indices, looked at in some rows of a sequence of `length`."""
    spread = torch.linspace(0, length - 1, _NUM_ROWS, device="cpu").long()
    rows = torch.cat((torch.arange(min(length, _NUM_ROWS), device="cpu"), spread))
    columns = torch.arange(length, device="cpu")
    try:
        allowed = evaluate(pattern, rows, columns)
    except (IndexError, RuntimeError):  # it looks things up by the tokens that it was made for
        raise refused(name, "masks by more than positions") from None
    count = int(allowed[-1].sum())
    window = None if count == length else count
    if not torch.equal(allowed, causal(rows, columns, window)):
        raise refused(name, "has a mask that is neither causal nor a sliding window")
    return window


def causal(rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
    """[rows, columns] bool: a query reads itself and what is before it, within the window."""
    allowed = columns[None, :] <= rows[:, None]
    return allowed if window is None else allowed & (columns[None, :] > rows[:, None] - window)
