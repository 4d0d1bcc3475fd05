"""Tables align by columns of the terminal, and wrap their last cell."""

from framework.runs.table import columns_of, table


def test_columns_are_those_of_the_terminal():
    assert [columns_of(text) for text in ("abc", "漢字", "é", "e\u0301", "")] == [3, 4, 1, 1, 0]


def test_cells_stand_under_each_other_whatever_their_characters():
    assert table([("漢", "a", "x"), ("b", "cc", "y")], indent=" ") == [" 漢  a   x", " b   cc  y"]


def test_last_cell_goes_on_below_itself():
    text = "one two three four five six seven"
    lines = table([("key", text)], width=30)
    assert lines == ["key  one two three four five", "     six seven"]
    assert table([("key", text)]) == [f"key  {text}"]


def test_word_that_is_too_long_stands_alone():
    assert table([("a", "x" * 40 + " y")], width=20) == ["a  " + "x" * 40, "   y"]
