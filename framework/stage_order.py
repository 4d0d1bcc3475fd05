"""Solves the order of a sampler pipeline from `order`, `before` and `after`. Knows names and numbers, no stage.

Only the composer calls this. A stage is placed by its own `order`, or beside the stages it names.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from framework.errors import ConfigError, did_you_mean

Rank = tuple[float, int, str]


@dataclass(frozen=True)
class Place:
    """Where a stage asks to stand. before, after: keys of other stages."""

    order: float | None = None
    before: Sequence[str] = ()
    after: Sequence[str] = ()


def solve_order(places: Mapping[str, Place], absent: Mapping[str, Place] | None = None) -> list[str]:
    """Keys of the stages in pipeline order.

    absent  stages that are known but not in this pipeline (removed, or of another sampler): as anchors they give a
            place and constrain nothing

    Topological over before and after; among free stages the lowest rank (order, side, key) goes first. A stage without
    an order takes its anchor's, just before (side -1) or just after it (side 1).
    ConfigError for an unknown anchor, a stage with no place at all, and a cycle, naming its stages.
    """
    known = {**(absent or {}), **places}
    for key, place in places.items():
        _check_anchors(key, place, known)
    followers: dict[str, set[str]] = {
        key: {name for name in place.before if name in places} for key, place in places.items()
    }
    for key, place in places.items():
        for anchor in place.after:
            if anchor in places:
                followers[anchor].add(key)
    return _topological(followers, {key: _placed(key, known) for key in places})


def _topological(followers: Mapping[str, set[str]], ranks: Mapping[str, Rank]) -> list[str]:
    waiting_for = {key: sum(key in later for later in followers.values()) for key in followers}
    free = [(ranks[key], key) for key, count in waiting_for.items() if count == 0]
    heapq.heapify(free)
    solved: list[str] = []
    while free:
        _, key = heapq.heappop(free)
        solved.append(key)
        for later in followers[key]:
            waiting_for[later] -= 1
            if waiting_for[later] == 0:
                heapq.heappush(free, (ranks[later], later))
    if len(solved) < len(followers):
        raise _cycle([key for key in followers if key not in solved])
    return solved


def _check_anchors(key: str, place: Place, known: Mapping[str, Place]) -> None:
    for word, names in (("before", place.before), ("after", place.after)):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"sampler.stages.{key}.{word}={name}: there is no stage '{name}'.{did_you_mean(name, known)}"
                    f" Stages: {', '.join(known)}"
                )


def _placed(key: str, known: Mapping[str, Place]) -> Rank:
    rank = _rank(key, known, ())
    if rank is None:
        raise ConfigError(
            f"sampler.stages.{key} has no place in the pipeline. Give it order=NUMBER, before=STAGE or after=STAGE"
        )
    return rank


def _rank(key: str, known: Mapping[str, Place], seen: tuple[str, ...]) -> Rank | None:
    """(order, side, key) of a stage, None when neither it nor any of its anchors has an order."""
    if key in seen:
        raise _cycle(seen[seen.index(key) :])
    place = known[key]
    if place.order is not None:
        return (place.order, 0, key)
    earlier = [rank for name in place.before if (rank := _rank(name, known, (*seen, key)))]
    if earlier:
        return (min(earlier)[0], -1, key)
    later = [rank for name in place.after if (rank := _rank(name, known, (*seen, key)))]
    return (max(later)[0], 1, key) if later else None


def _cycle(keys: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"sampler.stages: {', '.join(sorted(keys))} stand in a circle of before and after. Remove one of them"
    )
