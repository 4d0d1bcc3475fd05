"""What a request means when its caller is silent: default parameters, and the ids that end it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from framework.errors import CheckpointError, ConfigError, NotBuiltError, RequestError
from framework.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from framework.engine.admission import Admission
    from framework.interfaces import Checkpoint

_log = logging.getLogger("framework")
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_params(configured: Mapping[str, Any], checkpoint: Checkpoint) -> SamplingParams:
    """Where the caller passes none: `sampler.<param>` over generation_config.json over the class defaults."""
    stored = {k: v for k, v in checkpoint.generation_config.items() if k in _GENERATION_KEYS and v is not None}
    try:
        params = SamplingParams(**{**stored, **configured})
    except (TypeError, ValueError) as e:
        raise ConfigError(f"defaults of sampler.<param> and generation_config.json: {e}") from None
    # What only the checkpoint says is not the caller's word: it never makes a pipeline refuse.
    object.__setattr__(params, "named", frozenset(configured))
    return params


def check_defaults(admission: Admission, configured: Mapping[str, Any]) -> None:
    """Refuses configured defaults that this engine cannot serve, as it would refuse a request that names them.

    What only generation_config.json says refuses nothing; the log tells what of it has no effect here.
    """
    for name in _GENERATION_KEYS:
        value = getattr(admission.defaults, name)
        if name in configured or value == SamplingParams.defaults()[name]:
            continue
        try:
            admission.check(SamplingParams(**{name: value}))
        except (NotBuiltError, RequestError) as e:
            _log.warning("%s of generation_config.json has no effect: %s", name, e)
    try:
        admission.check(admission.defaults)
    except NotBuiltError as e:
        raise NotBuiltError(str(e).replace("SamplingParams.", "sampler.", 1)) from None
    except RequestError as e:
        raise ConfigError(f"defaults of sampler.<param>: {e}") from None


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a request: of generation_config.json and config.json, else the tokenizer's.

    CheckpointError for what is no id; the log tells of one outside the vocabulary, which no model can give.
    """
    found: list[int] = []
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = [tokenizer.eos_token_id]
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise CheckpointError(
                f"{checkpoint.location}: eos_token_id must be a token id or a list of them, got {i!r}. "
                "Correct config.json and generation_config.json"
            )
        if i >= vocab_size:
            _log.warning("eos_token_id %d has no effect: it is outside the vocabulary 0..%d", i, vocab_size - 1)
    return tuple(dict.fromkeys(i for i in found if i < vocab_size))
