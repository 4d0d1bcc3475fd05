"""A stage's own parameters in a request's `extra_args`, read and checked; what they mean is the stage's part.

Every refusal is a ValueError that names field, value and range, as `SamplerStage.validate` must raise it. Called by the
stages of this package that have no field of SamplingParams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.errors import shown
from framework.request import SamplingParams, as_integer, plain


def asks(params: SamplingParams, stage: str) -> bool:
    """Whether the request names the stage in its extra_args, with parameters or without."""
    return stage in (params.extra_args or {})


def own(params: SamplingParams, stage: str) -> Mapping[str, Any]:
    """The request's parameters of the stage, {} without any; arrays and tensors as lists and numbers."""
    return {name: plain(value) for name, value in (params.extra_args or {}).get(stage, {}).items()}


def number(where: str, value: Any, low: float, high: float, ends: str = "[]") -> float:
    """`value` as a float between `low` and `high`; `ends` says as in "[)" which of the two belongs to the range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} must be a number, got {shown(value)}")
    inside = (low <= value if ends[0] == "[" else low < value) and (value <= high if ends[1] == "]" else value < high)
    if not inside:  # NaN is inside of nothing
        raise ValueError(f"{where} must be in {ends[0]}{low:g}, {high:g}{ends[1]}, got {shown(value)}")
    return float(value)


def integer(where: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int of low..high, without a limit above for None."""
    value = _int(where, value)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{where} must be {limit}, got {shown(value)}")
    return value


def token_ids(where: str, value: Any, vocab_size: int, most: int) -> tuple[int, ...]:
    """`value` as at most `most` ids of the vocabulary."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{where} must be a list of token ids, got {shown(value)}")
    if len(value) > most:
        raise ValueError(f"{where} must have at most {most} ids, got {len(value)}")
    return tuple(integer(f"{where}[{place}]", one, 0, vocab_size - 1) for place, one in enumerate(value))


def _int(where: str, value: Any) -> int:
    try:
        return as_integer(where, value)
    except TypeError as error:
        raise ValueError(str(error)) from None
