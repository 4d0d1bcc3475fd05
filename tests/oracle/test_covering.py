"""The arrays of this folder: small, and covering."""

from __future__ import annotations

import pytest

from .covering import combinations_of, covering, groups_of
from .settings import FACTORS


@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.full)])
def test_any_values_of_as_many_factors_stand_together_in_a_case(strength: int) -> None:
    there = {group for case in covering(FACTORS, strength) for group in groups_of(case, strength)}
    assert there == set(combinations_of(FACTORS, strength))


def test_the_array_of_pairs_is_small() -> None:
    assert len(covering(FACTORS)) <= 40


def test_arrays_are_the_same_in_every_run() -> None:
    factors = {"a": [1, 2], "b": ["x", "y", "z"], "c": [True, False]}
    assert covering(factors) == covering(factors)
    assert len(covering(factors, strength=3)) == 12
