"""Pairwise covering arrays: few cases in which any two values of any two factors stand together at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: at each turn the case of the whole product that covers most of the pairs still open; deterministic."""
    names = list(factors)
    cases = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]
    open_pairs = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while open_pairs:
        best = max(cases, key=lambda case: len(open_pairs & _pairs(case)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(case: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(sorted(case), 2)}
