"""`SamplingParams.structured_outputs` as a `GrammarSpec`: one text a constraint, whatever form the caller gave it in.

Says nothing of whether an engine can serve it. Called at admission, by `framework.structured.grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.errors import RequestError, shown
from framework.interfaces import GrammarSpec

if TYPE_CHECKING:
    from framework.request import StructuredOutputsParams


def kind_of(params: StructuredOutputsParams) -> str:
    """Name of the field that is set: the constructor has seen that it is one."""
    return next(name for name in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
                if getattr(params, name) is not None)  # fmt: skip


def spec_of(params: StructuredOutputsParams) -> GrammarSpec:
    """The constraint. RequestError, naming the field, for what is no JSON."""
    kind = kind_of(params)
    value: Any = getattr(params, kind)
    if kind == "json_object":
        return GrammarSpec(kind, "")
    if kind == "choice":
        return GrammarSpec(kind, json.dumps(list(value), ensure_ascii=False))
    if kind in ("json", "structural_tag"):
        return GrammarSpec(kind, _json_text(f"structured_outputs.{kind}", value))
    return GrammarSpec(kind, value)


def _json_text(name: str, value: str | Mapping[str, Any]) -> str:
    """JSON in one spelling; the order of keys stays, since it is the order in which properties are generated."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shown(value)} cannot be read as JSON ({error}). Correct it") from None
