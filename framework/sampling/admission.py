"""Whether a pipeline can serve a request's parameters: nothing the caller named may be ignored.

Knows the fields of SamplingParams and what stages declare to read, and no stage by name. Called by the pipeline's
`validate`, before anything of the request runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from framework.errors import NotBuiltError, RequestError, did_you_mean, shown
from framework.request import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    from framework.request import SamplingParams
    from framework.sampling.deployed import Deployed

FIELDS_WITH_STAGES = (
    "structured_outputs", "min_tokens", "allowed_token_ids", "bad_words", "bad_words_token_ids", "logit_bias",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "top_k", "top_p", "min_p",
)  # fmt: skip
"""Sampling fields whose stages are ours; a pipeline need not have them."""


def check_request(name: str, stages: Sequence[Deployed], vocab_size: int, params: SamplingParams) -> None:
    """Raises RequestError, or NotBuiltError for a promised part that is not there. `name` is that of the pipeline."""
    _check_switches(stages, params)
    _check_extra_args(stages, params)
    active = active_stages(stages, params)
    for field in FIELDS_WITH_STAGES:
        if field in params.named and not _is_off(field, getattr(params, field), vocab_size):
            _check_read(name, stages, active, field, getattr(params, field))
    for one in active:
        _ask(name, one, params)
    _check_some_id_is_left(active, vocab_size, params)


def active_stages(stages: Sequence[Deployed], params: SamplingParams) -> list[Deployed]:
    """Stages that the request did not switch off."""
    switches = params.stages or {}
    return [s for s in stages if switches.get(s.key, True)]


def _is_off(field: str, value: Any, vocab_size: int) -> bool:
    """Whether the value asks for nothing, or for what the pipeline itself decides (greedy rows)."""
    if field == "temperature":
        return value == 1.0 or value < GREEDY_TEMPERATURE
    if field == "top_k":
        return value <= 1 or value >= vocab_size
    if field in ("min_p", "frequency_penalty", "presence_penalty"):
        return value == 0.0
    if field in ("top_p", "repetition_penalty"):
        return value == 1.0
    return not value


def _check_read(name: str, stages: Sequence[Deployed], active: Sequence[Deployed], field: str, value: Any) -> None:
    if any(field in s.spec.params for s in active):
        return
    readers = [s.key for s in stages if field in s.spec.params]
    if readers:
        raise RequestError(
            f"stages switches off '{readers[0]}', the stage of sampler={name} that reads {field}={shown(value)}."
            " Leave out one of the two"
        )
    raise RequestError(
        f"sampler={name} has no stage that reads {field}={shown(value)}, so it would be ignored. Leave {field} out,"
        " or deploy a stage that reads it, such as those of sampler=gumbel"
    )


def _check_switches(stages: Sequence[Deployed], params: SamplingParams) -> None:
    known = {s.key: s for s in stages}
    for key, on in (params.stages or {}).items():
        if key not in known:
            raise RequestError(f"stages names {shown(key)}, {_unknown(key, known)}")
        if not on and known[key].spec.essential:
            raise RequestError(f"stages cannot switch '{key}' off: the request's constraints depend on it")
        if not on and known[key].spec.kind == "select":
            raise RequestError(f"stages cannot switch '{key}' off: no other stage of the pipeline picks a token")


def _check_extra_args(stages: Sequence[Deployed], params: SamplingParams) -> None:
    known = {s.key: s for s in stages}
    for key, given in (params.extra_args or {}).items():
        if key not in known:
            raise RequestError(f"extra_args names {shown(key)}, {_unknown(key, known)}")
        if not (params.stages or {}).get(key, True):
            raise RequestError(f"extra_args has parameters for '{key}', which stages switches off. Leave out one")
        takes = known[key].spec.extra_args
        for name in given:
            if name not in takes:
                raise RequestError(
                    f"extra_args.{key} has no {shown(name)}.{did_you_mean(str(name), takes)}"
                    f" Stage '{key}' takes {', '.join(takes) or 'none'}"
                )


def _unknown(key: str, known: Any) -> str:
    return f"which is no stage of this pipeline.{did_you_mean(key, known)} Deployed: {', '.join(known)}"


def _check_some_id_is_left(active: Sequence[Deployed], vocab_size: int, params: SamplingParams) -> None:
    """Refuses an allow-list of which other parameters forbid every id, whatever is generated."""
    left, by = set(params.allowed_token_ids or ()), []
    if not left:
        return
    for one in active:
        forbidden = left.intersection(one.forbidden_ids(params))
        if forbidden:
            by += [f for f in one.spec.params if not _is_off(f, getattr(params, f), vocab_size)]
            left -= forbidden
    if not left:
        raise RequestError(
            f"allowed_token_ids={shown(list(params.allowed_token_ids))} leaves no token: every id of it is forbidden by"
            f" {' and '.join(f for f in by if f != 'allowed_token_ids')}. Allow another id, or leave a word out"
        )


def _ask(name: str, one: Deployed, params: SamplingParams) -> None:
    try:
        one.stage.validate(one.view(params))
    except NotBuiltError:
        raise
    except ValueError as error:
        raise RequestError(
            f"sampler={name}: stage '{one.key}' refuses the request: {one.in_its_words(str(error))}"
        ) from error
