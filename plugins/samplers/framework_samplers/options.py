"""Options of the stages that have some, in a module that imports no torch: composing a configuration reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChosenIdsConfig:
    """Options of `chosen_ids`. ids: what a request is told that asks with extra_args={"chosen_ids": {}}."""

    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class DryConfig:
    """Options of `dry`.

    sequence_breakers  of requests that name none: texts or token ids. The last token of a text counts. A model without
                       a tokenizer has no use for the texts
    """

    sequence_breakers: list[Any] = field(default_factory=lambda: ["\n", ":", '"', "*"])


@dataclass(frozen=True)
class MirostatConfig:
    """Options of `mirostat`, for requests that do not say it themselves.

    tau  surprise in bits that the tokens shall have on average; eta: share of its error that a token corrects
    """

    tau: float = 5.0
    eta: float = 0.1


@dataclass(frozen=True)
class ThinkingBudgetConfig:
    """Options of `thinking_budget`.

    start, end  what begins thinking and what ends it: a text, a token id, or a list of ids
    """

    start: Any = "<think>"
    end: Any = "</think>"


@dataclass(frozen=True)
class XtcConfig:
    """Options of `xtc`.

    protected  texts or token ids, beside the eos ids of the checkpoint: a row in which one of them would be cut off is
               left as it is. The last token of a text counts. A model without a tokenizer has no use for the texts
    """

    protected: list[Any] = field(default_factory=lambda: ["\n"])
