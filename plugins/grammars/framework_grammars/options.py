"""Options of the grammars, as `conf/grammar/*.yaml` sets them. Imports no library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class XGrammarOptions:
    """any_whitespace: between the parts of JSON; false: `{"a": 1}` and nothing else.

    strict       objects have the properties that the schema names and arrays the items, and no others, unless the
                 schema says `additionalProperties` or `items`; false: as JSON Schema has it
    max_threads  of one compilation
    """

    any_whitespace: bool = True
    strict: bool = True
    max_threads: int = 4


@dataclass(frozen=True)
class LLGuidanceOptions:
    """any_whitespace: between the parts of JSON; false: none at all."""

    any_whitespace: bool = True
