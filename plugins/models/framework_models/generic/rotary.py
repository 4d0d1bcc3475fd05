"""Rotary embeddings of a model of transformers: their frequencies stay as they are, whatever is in the batch."""

from __future__ import annotations

from typing import Any

from framework.errors import CheckpointError


def check_rotary(name: str, model: Any, length: int) -> None:
    """Frequencies that follow the longest sequence of a batch would let requests depend on their neighbours:
    CheckpointError where they change within `length` tokens."""
    for module in model.modules():
        for kind in _rope_types(module).values():
            limit = _longest(kind, module.config)
            if limit is not None and length > limit:
                raise CheckpointError(
                    f"model=transformers: rope_type '{kind}' of {name} serves up to {limit} tokens, and max_model_len "
                    f"is {length}: beyond, frequencies follow the longest request. Use engine.max_model_len={limit}"
                )


def keep_frequencies(model: Any) -> None:
    """Rotary embeddings look no longer whether their frequencies should change: within max_model_len they do not."""
    for module in model.modules():
        if kinds := _rope_types(module):
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(module.rope_type, dict) else "default"


def _rope_types(module: Any) -> dict[str, str]:
    kinds = getattr(module, "rope_type", {})
    return kinds if isinstance(kinds, dict) else {"": kinds}


def _longest(kind: str, config: Any) -> int | None:
    """Tokens up to which the frequencies of a rope type stay as they are; None for any number."""
    if "dynamic" in kind:
        return int(config.max_position_embeddings)
    if kind != "longrope":
        return None
    ropes = config.rope_parameters
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    return min(int(rope["original_max_position_embeddings"]) for rope in nested if rope.get("rope_type") == "longrope")
