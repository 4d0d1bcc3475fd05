"""What a watched step tells of its rows: the data alone, without torch. `sampling.watched` makes it, and a trace holds
it; a replay compares it with what its own steps tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WATCHED = "\x1fwatched"
"""Under which `StepOutput.payloads` holds `WatchedRows`: no stage has such a name."""
SEED, LOGITS, ARGMAX = "seed", "logits", "argmax"
"""What stands in a trail beside stages: the row's seed, the model's logits, and the token of a row that is greedy."""

Trail = Sequence[tuple[str, str | int]]
"""Of one row: (stage, 16 hexadecimal digits of what stands behind it) of those that changed something, in the order in
which they ran. First come `seed`, of a row that draws, and `logits`, and last the select stage with the token that it
picked, -1 for none."""


@dataclass(frozen=True)
class WatchedRows:
    """trails: one a logits row of the step. logits [L, V] of the model, on the host; None where they are not kept."""

    trails: list[Trail]
    logits: Any = None


def watched_rows(payloads: Mapping[str, Any]) -> WatchedRows | None:
    """What a step's output tells of its rows, None of a step that sampled nothing or was not watched."""
    found: WatchedRows | None = payloads.get(WATCHED)
    return found
