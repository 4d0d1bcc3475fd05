"""Covering arrays: few cases in which any `strength` values of as many factors stand together at least once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]


def covering(factors: Mapping[str, Sequence[Any]], strength: int = 2, tries: int = 30) -> list[Case]:
    """Greedy: each turn makes `tries` cases, value by value, and keeps the one that closes most of what is still open.

    Deterministic. Source: AETG, Cohen et al. 1997, section 4.
    """
    random = Random(0)
    still_open = dict.fromkeys(combinations_of(factors, strength))  # in order, unlike a set of strings
    cases = []
    while still_open:
        made = [_make_case(factors, strength, still_open, random) for _ in range(tries)]
        best = max(made, key=lambda case: sum(group in still_open for group in groups_of(case, strength)))
        cases.append(best)
        for group in groups_of(best, strength):
            still_open.pop(group, None)
    return cases


def combinations_of(factors: Mapping[str, Sequence[Any]], strength: int) -> Iterator[tuple[Any, ...]]:
    """((name, value), ...) of every `strength` factors, in the order of names."""
    for names in combinations(sorted(factors), strength):
        for values in product(*(factors[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def groups_of(case: Case, strength: int) -> Iterator[tuple[Any, ...]]:
    """Those that stand together in a case."""
    return combinations(sorted(case.items()), strength)


def _make_case(
    factors: Mapping[str, Sequence[Any]], strength: int, still_open: Mapping[Any, None], random: Random
) -> Case:
    """Starts with one that is open; each further factor takes the value that closes most."""
    case = dict(random.choice(list(still_open)))
    for name in random.sample(list(factors), len(factors)):
        if name not in case:
            others = list(combinations(sorted(case.items()), strength - 1))
            case[name] = max(
                random.sample(list(factors[name]), len(factors[name])),
                key=lambda value: sum(tuple(sorted((*some, (name, value)))) in still_open for some in others),
            )
    return {name: case[name] for name in factors}
