"""Fills a model of transformers that stands on the meta device out of a `WeightSource`.

transformers 5 holds some weights in other shapes than checkpoints do (experts side by side, for one). Its own table of
conversions is asked backwards for the names and shapes of the checkpoint's tensors, which are taken one layer at a time
and converted forwards: so every tensor is named, checked and counted like those of any model here, from any format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import ModelContext


def load_weights(model: Any, ctx: ModelContext) -> None:
    """Every parameter and buffer, in place. CheckpointError names what is missing or of another shape."""
    wide = _float32_names(model, ctx.dtype)
    tied = [name for name in model.all_tied_weights_keys if not _found(model, ctx, name)]
    for names in _by_layer(_stored(model, tied)):
        state = {name: _take(model, ctx, name, meta, wide) for name, meta in names}
        _convert(model, ctx, state)
    for name in tied:
        _set(model, name, model.get_parameter_or_buffer(model.all_tied_weights_keys[name]))
    _fill_buffers(model, ctx)
    empty = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if empty:
        raise CheckpointError(
            f"model=transformers: the checkpoint's tensors do not give {len(empty)} weights of "
            f"{type(model).__name__}, {empty[0]} among them. Use a model plugin of this architecture"
        )


def _float32_names(model: Any, dtype: torch.dtype) -> list[str]:
    """Parts of the names of weights that stay in float32 whatever the model's dtype is."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    return sorted(names)


def _stored(model: Any, tied: Sequence[str]) -> list[tuple[str, Tensor]]:
    """(name, shape as a tensor on the meta device) of the checkpoint's tensors, as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    return list(revert_weight_conversion(model, state).items())


def _by_layer(stored: Sequence[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of what may have to be converted together: those whose names agree up to the first number."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, meta in stored:
        match = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(match[0] if match else "", []).append((name, meta))
    yield from groups.values()


def _found(model: Any, ctx: ModelContext, name: str) -> str | None:
    """The name under which the checkpoint has a tensor: one of a base model lacks the prefix."""
    bare = name.removeprefix(f"{model.base_model_prefix}.")
    return next((one for one in (name, bare) if ctx.weights.has(one)), None)


def _take(model: Any, ctx: ModelContext, name: str, meta: Tensor, wide: Sequence[str]) -> Tensor:
    is_wide = meta.dtype == torch.float32 or any(part in name for part in wide)
    dtype = torch.float32 if is_wide else ctx.dtype if meta.is_floating_point() else meta.dtype
    return ctx.weights.take(_found(model, ctx, name) or name, tuple(meta.shape), dtype)


def _convert(model: Any, ctx: ModelContext, state: dict[str, Tensor]) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    told = LoadStateDictConfig(
        dtype=ctx.dtype,
        dtype_plan=model._get_dtype_plan(ctx.dtype),
        device_map={"": ctx.device},
        weight_mapping=cast(Any, get_model_conversion_mapping(model)),
    )
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        convert_and_load_state_dict_in_model(model, state, told)
    finally:
        if shows:
            logging.enable_progress_bar()


def _set(model: Any, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def _fill_buffers(model: Any, ctx: ModelContext) -> None:
    """What no checkpoint holds and follows from the config, frequencies of rotary embeddings above all."""
    for value in model.state_dict(keep_vars=True).values():
        value._is_hf_initialized = True  # what was loaded stays
    model._move_missing_keys_from_meta_to_device(set(), {"": ctx.device}, None, None)
    model._initialize_missing_keys(False)
