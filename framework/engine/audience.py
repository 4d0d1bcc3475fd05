"""Who listens to steps that go on with the same requests: their states, looked up once, and what silent ones hear.

A silent request gives no output before its end. What it hears is kept by the step on the engine's thread, which does
nothing a request for it, and comes to its state in one go: when the course of steps is over, or has become long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from framework.engine.completion import RowHeard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.batch import LogprobsColumns, StepOutput
    from framework.engine.output import OutputState
    from framework.request import NewTokens, OneEach, Request

MAX_HEARD = 64
"""Steps after which silent states are told in any case: a longer silence would end in a longer pause."""


@dataclass(slots=True)
class Heard:
    """What k steps gave, a token to each batch row.

    rows     {state: (completion, batch row) of its requests}
    moments  [k] monotonic seconds
    sampled  k times [R, 1] int32
    columns  logprobs of each step, a row each batch row; of steps that have some
    """

    rows: Mapping[OutputState, Sequence[tuple[int, int]]]
    moments: list[float] = field(default_factory=list)
    sampled: list[NDArray[np.int32]] = field(default_factory=list)
    columns: list[LogprobsColumns] = field(default_factory=list)

    def tell(self) -> None:
        """Brings the states up to date. They must not have heard of any later step."""
        tokens = np.concatenate(self.sampled, axis=1).tolist()
        logprobs = np.stack([c.sampled for c in self.columns], axis=1).tolist() if self.columns else [[]] * len(tokens)
        gaps = [after - before for before, after in pairwise(self.moments)]
        for state, rows in self.rows.items():
            heard = [RowHeard(index, row, tokens[row], logprobs[row]) for index, row in rows]
            state.hear(heard, self.columns, self.moments, gaps)


class Audience:
    """States of `requests`, which are those of an `OneEach`, in batch-row order."""

    def __init__(self, requests: Sequence[Request], states: Mapping[str, OutputState]) -> None:
        self.requests = requests
        self._loud: list[tuple[OutputState, int]] = []
        self._silent: dict[OutputState, list[tuple[int, int]]] = {}
        for row, request in enumerate(requests):
            state = states[request.parent_id]
            if state.is_silent:
                self._silent.setdefault(state, []).append((request.sample_index, row))
            else:
                self._loud.append((state, row))
        self._heard = Heard(self._silent)

    def is_of(self, news: OneEach) -> bool:
        return self.requests is news.requests or self.requests == news.requests

    def overhears(self, news: OneEach, step: StepOutput | None, now: float) -> bool:
        """Keeps what a step gave where that is all there is to do; else changes nothing, and answers False."""
        if self._loud or news.requests is not self.requests or len(self._heard.moments) + 1 >= MAX_HEARD:
            return False
        self._keep(news, step, now)
        return True

    def hear(self, news: OneEach, step: StepOutput | None, now: float) -> list[tuple[OutputState, NewTokens]]:
        """Keeps what the silent ones are told, and returns what the others are to be told now."""
        if self._silent:
            self._keep(news, step, now)
        return [(state, news.of_row(row)) for state, row in self._loud]

    def _keep(self, news: OneEach, step: StepOutput | None, now: float) -> None:
        self._heard.moments.append(now)
        self._heard.sampled.append(news.sampled)
        if step is not None and step.logprobs is not None:
            self._heard.columns.append(step.logprobs)

    @property
    def is_full(self) -> bool:
        return len(self._heard.moments) >= MAX_HEARD

    def take(self) -> Heard | None:
        """What the silent ones were told since the last call and do not know yet; None for nothing."""
        heard = self._heard
        if not heard.moments:
            return None
        self._heard = Heard(self._silent)
        return heard


NOBODY = Audience((), {})
