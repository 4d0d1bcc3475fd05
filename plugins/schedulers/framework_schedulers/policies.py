"""Who goes first and who yields: first come first served, by priority, shortest prompt first.

Pure orderings over requests. The default scheduler asks them; what an admission or a preemption does is its affair.
When blocks run out it asks for a victim among the running requests, and for an admission with the newcomer beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.request import Request

_arrival = attrgetter("arrival_index")
_priority = attrgetter("priority", "arrival_index")


class Fcfs:
    """First come, first served; the latest arrival yields."""

    def __init__(self, options: Mapping[str, Any], ctx: Any) -> None:
        pass

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return sorted(waiting, key=_arrival)

    def admit(self, request: Request, budget: int) -> bool:
        return True

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_arrival)


class Priority:
    """The lowest `priority` number first, ties by arrival; the highest number yields, and of those the latest arrival.

    Strict: a steady stream of urgent requests holds the others back for as long as it lasts.
    """

    def __init__(self, options: Mapping[str, Any], ctx: Any) -> None:
        pass

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return sorted(waiting, key=_priority)

    def admit(self, request: Request, budget: int) -> bool:
        return True

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_priority)


class Shortest:
    """The fewest tokens left to compute first, ties by arrival; the one with the most left yields, ties the latest.

    What is left is counted over known tokens: the prompt, and for a preempted request its outputs as well.
    Long prompts do not starve: once `PATIENCE` requests have gone past the oldest waiting one, that one goes next.
    """

    PATIENCE = 256

    def __init__(self, options: Mapping[str, Any], ctx: Any) -> None:
        self._oldest: Request | None = None
        self._went_past: set[str] = set()

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        if not waiting:
            return waiting
        oldest = min(waiting, key=_arrival)
        if oldest is not self._oldest:
            self._oldest = oldest
            self._went_past.clear()
        ordered = sorted(waiting, key=_shortness)
        if len(self._went_past) >= self.PATIENCE:
            ordered.remove(oldest)
            ordered.insert(0, oldest)
        return ordered

    def admit(self, request: Request, budget: int) -> bool:
        if request is not self._oldest:
            self._went_past.add(request.request_id)  # a set: a request that finds no blocks is asked for again
        return True

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_shortness)


def _shortness(request: Request) -> tuple[int, float]:
    return request.num_tokens - request.num_computed_tokens, request.arrival_index
