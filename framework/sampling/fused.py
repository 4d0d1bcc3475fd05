"""The sampler of a backend that fuses stages: which of a step's stages run as its operations, and what between them.

A stage takes part by naming an operation; what names none runs as it does everywhere, on the logits that those before
it have made. Knows no device and no stage by name. Called by the pipeline when its backend has `SamplerOps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from framework.sampling.interval import open_interval

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import Rows
    from framework.interfaces import FusedChoice, SamplerOps
    from framework.sampling.deployed import Deployed

OF_ONE_STEP = frozenset({"bitmask"})
"""Operations whose operands are made anew for every step."""
ARGMAX = "argmax"
"""The operation of a step in which nothing is drawn."""
Link = tuple[str, Mapping[str, Any]]
"""An operation and its operands."""


class FusedSampler:
    """Runs a step's stages with `ops`. apply: how a stage that is not fused changes float32 logits in place."""

    def __init__(self, ops: SamplerOps, apply: Callable[[Sequence[Deployed], Tensor, Rows], None]) -> None:
        self._ops, self._apply = ops, apply
        self._order = {name: place for place, name in enumerate(ops.fuses)}

    def choose(self, logits: Tensor, rows: Rows, stages: Sequence[Deployed]) -> FusedChoice | None:
        """Tokens of all rows, greedy ones among them; None when the select stage is not fused.

        stages  those that the step runs, in pipeline order, observers left out; no select stage when all are greedy.
        Logits stay as they are. Greedy rows go through every stage: what one leaves alone it leaves bit for bit.
        """
        links = [self._link(one, rows) for one in stages]
        if not stages or stages[-1].spec.kind != "select":
            links.append((ARGMAX, {}))
        if links[-1] is None:
            return None
        start = len(links) - len(self._last_chain(links))
        step = _Step(self._ops, self._apply, logits, rows)
        place = 0
        while place < start:
            chain = self._chain(stages[place:start], links[place:start])
            if chain:
                step.run_fused(chain, stages[place])
            else:
                step.run_alone(stages[place])
            place += max(1, len(chain))
        return self._ops.sample(step.logits, rows, self._last_chain(links), step.interval)

    def _link(self, one: Deployed, rows: Rows) -> Link | None:
        """The stage as an operation, None for one that runs by itself in this step."""
        name = one.spec.fused
        if name not in self._order or not one.keeps("kept_set"):
            return None
        operands = one.stage.operands(rows)
        return None if operands is None else (name, operands)

    def _last_chain(self, links: Sequence[Link | None]) -> list[Link]:
        """The longest end of the links that is one chain."""
        chain: list[Link] = []
        for link in reversed(links):
            if link is None or (chain and not self._order[link[0]] < self._order[chain[0][0]]):
                break
            chain.insert(0, link)
        return chain

    def _chain(self, stages: Sequence[Deployed], links: Sequence[Link | None]) -> list[Link]:
        """The longest beginning of the links that is one chain of stages with the same method."""
        chain: list[Link] = []
        for one, link in zip(stages, links, strict=True):
            if link is None or (one.spec.kind == "threshold") != (stages[0].spec.kind == "threshold"):
                break
            if chain and not self._order[chain[-1][0]] < self._order[link[0]]:
                break
            chain.append(link)
        return chain


class _Step:
    """Logits and kept interval on their way; interval None keeps everything."""

    def __init__(self, ops: SamplerOps, apply: Callable[..., None], logits: Tensor, rows: Rows) -> None:
        self.logits = logits
        self.interval: tuple[Tensor, Tensor] | None = None
        self._ops, self._apply, self._rows = ops, apply, rows
        self._is_own = False

    def run_fused(self, chain: Sequence[Link], first: Deployed) -> None:
        if first.spec.kind == "threshold":
            self.interval = self._ops.bounds(self.logits, self._rows, chain, *self._bounds())
        else:
            self.logits, self._is_own = self._ops.apply(self.logits, self._rows, chain), True

    def run_alone(self, one: Deployed) -> None:
        if one.spec.kind == "threshold":
            self.interval = one.stage.bounds(self.logits.float(), self._rows, *self._bounds())
            return
        if not self._is_own:
            self.logits, self._is_own = self.logits.to(torch.float32, copy=True), True
        self._apply([one], self.logits, self._rows)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        if self.interval is None:
            self.interval = open_interval(len(self.logits), self.logits.device)
        return self.interval
