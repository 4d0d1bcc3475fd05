"""From a config.json to a model of transformers without weights, on the meta device; what it cannot be is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from framework.errors import CheckpointError, class_and_text, code_is_never_run
from framework.interfaces import ModelContext
from framework_models.generic.attention import PAGED
from framework_models.generic.layers import refused

_REFUSED: Mapping[str, str] = {
    "is_encoder_decoder": "is an encoder with a decoder",
    "quantization_config": "is quantized",
    "num_kv_shared_layers": "shares keys and values between layers",
}
"""Keys of config.json that change what would be computed, when they are set to anything."""


def class_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """(architecture, its class). CheckpointError for one that is no causal language model of transformers."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str((config.get("architectures") or ["?"])[0])
    for key, what in _REFUSED.items():
        if config.get(key):
            raise refused(name, f"{what} ({key})")
    made = getattr(transformers, name, None)
    if made is None or name not in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise CheckpointError(
            f"model=transformers: transformers {transformers.__version__} has no causal language model {name}."
            f"{code_is_never_run(config)} Use a checkpoint of one that it has, or a model plugin that serves this one"
        )
    if getattr(made, "_is_stateful", False):
        raise refused(name, "carries a state from token to token")
    if not made._can_set_attn_implementation():
        raise refused(name, "does not call its attention through transformers' attention interface")
    return name, made


def build(made: Any, config: Mapping[str, Any], ctx: ModelContext, *, is_outline: bool) -> Any:
    """The model without weights, on the meta device."""
    try:
        return _built(made, config, ctx, is_outline=is_outline)
    except Exception as error:  # of a config that transformers does not take, whatever it raises then
        raise CheckpointError(
            f"model=transformers: config.json makes no {made.__name__} ({class_and_text(error)}). Correct it"
        ) from error


def _built(made: Any, config: Mapping[str, Any], ctx: ModelContext, *, is_outline: bool) -> Any:
    own = made.config_class.from_dict(deepcopy(dict(config)))  # it writes into what is nested
    own.output_router_logits = False
    words: dict[str, Any] = {"dtype": ctx.dtype, "attn_implementation": PAGED}
    if is_outline and made._can_set_experts_implementation():
        words["experts_implementation"] = "batched_mm"  # the one that knows shapes for every dtype
    with torch.device("meta"):
        return made._from_config(own, **words).eval()


def layers_of(name: str, causal: Any) -> Any:
    """The part between embedding and head."""
    base = getattr(causal, causal.base_model_prefix, None)
    if base is None:
        raise refused(name, f"has no part '{causal.base_model_prefix}'")
    known = inspect.signature(base.forward).parameters
    for word in ("inputs_embeds", "position_ids"):
        if word not in known:
            raise refused(name, f"takes no {word}")
    return base
