"""The order of a pipeline follows order, before and after; what cannot be ordered is refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from framework.stage_order import Place, solve_order

OURS = {"penalties": Place(600), "temperature": Place(700), "min_p": Place(800), "gumbel": Place(1100)}


def test_stages_stand_by_their_order_whatever_the_order_of_the_keys():
    assert solve_order(dict(reversed(OURS.items()))) == list(OURS)


def test_stage_before_an_anchor_stands_just_before_it():
    order = solve_order({**OURS, "mine": Place(before=("min_p",))})
    assert order == ["penalties", "temperature", "mine", "min_p", "gumbel"]


def test_stage_after_an_anchor_stands_just_after_it():
    order = solve_order({**OURS, "mine": Place(after=("penalties",))})
    assert order == ["penalties", "mine", "temperature", "min_p", "gumbel"]


def test_anchor_may_itself_be_placed_by_an_anchor():
    order = solve_order({**OURS, "a": Place(before=("b",)), "b": Place(before=("min_p",))})
    assert order == ["penalties", "temperature", "a", "b", "min_p", "gumbel"]


def test_before_wins_over_a_higher_order():
    assert solve_order({"a": Place(1), "b": Place(9, before=("a",))}) == ["b", "a"]


def test_of_several_anchors_the_first_to_come_gives_the_place():
    order = solve_order({**OURS, "mine": Place(before=("gumbel", "temperature"))})
    assert order.index("mine") == 1


def test_absent_anchor_gives_a_place_and_constrains_nothing():
    without = {key: place for key, place in OURS.items() if key != "temperature"}
    order = solve_order({**without, "mine": Place(before=("temperature",))}, {"temperature": Place(700)})
    assert order == ["penalties", "mine", "min_p", "gumbel"]


def test_equal_orders_stand_by_name():
    assert solve_order({"b": Place(1), "a": Place(1)}) == ["a", "b"]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            {"mine": Place(before=("temprature",))},
            r"mine\.before=temprature: there is no stage .* mean 'temperature'\?",
        ),
        ({"mine": Place()}, r"sampler\.stages\.mine has no place in the pipeline"),
        ({"a": Place(before=("b",)), "b": Place(before=("a",))}, r"sampler\.stages: a, b stand in a circle"),
        ({"a": Place(1, after=("b",)), "b": Place(2, after=("a",))}, r"sampler\.stages: a, b stand in a circle"),
        ({"a": Place(before=("a",))}, r"sampler\.stages: a stand"),
    ],
)
def test_what_cannot_be_ordered_is_refused_by_name(places, message):
    with pytest.raises(ConfigError, match=message):
        solve_order({**OURS, **places})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 9), max_size=3)), min_size=1, max_size=9))
def test_every_constraint_holds_in_whatever_is_solved(drawn):
    names = [f"s{i}" for i in range(len(drawn))]
    # Anchors with a higher number only: no circle can arise.
    places = {
        name: Place(order, before=tuple(f"s{j}" for j in later if i < j < len(drawn)))
        for i, (name, (order, later)) in enumerate(zip(names, drawn, strict=True))
    }
    solved = solve_order(places)
    assert sorted(solved) == sorted(names)
    assert all(solved.index(name) < solved.index(other) for name in names for other in places[name].before)
