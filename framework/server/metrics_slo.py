"""Objectives for the times of a request, and whether one met them: goodput is the rate of those that did.

Pure data; the keys `server.slo.*` are these fields, and the engine's metrics ask.
Source: DistServe (OSDI'24), section 2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.request import RequestMetrics

SERVED = frozenset({"stop", "length"})
"""Finish reasons of completions that ended as they were meant to."""


@dataclass(frozen=True)
class Objectives:
    """Most milliseconds that a request may take; None: any time.

    ttft_ms  arrival to first token
    tpot_ms  mean of the tokens after the first; a request of one token has none, and meets it
    e2e_ms   arrival to end
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.stated().items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"server.slo.{name}={value} must be above 0 and finite, milliseconds, or null")

    def stated(self) -> dict[str, float]:
        """{name: milliseconds} of the objectives that there are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def outcome(self, reasons: Collection[str], metrics: RequestMetrics) -> str:
        """`good`, or `late` for a request that was served too late, or `error` or `abort` for one that was not served.

        reasons  finish reasons of its completions
        """
        for reason in ("error", "abort"):
            if reason in reasons:
                return reason
        assert SERVED.issuperset(reasons), f"finish reasons {sorted(reasons)}"
        is_good = (
            _keeps(metrics.ttft, self.ttft_ms)
            and _keeps(metrics.tpot, self.tpot_ms)
            and _keeps(metrics.e2e, self.e2e_ms)
        )
        return "good" if is_good else "late"


def _keeps(took_s: float | None, most_ms: float | None) -> bool:
    return most_ms is None or took_s is None or 1e3 * took_s <= most_ms
