"""Closed-up spaces of a growing text are those of the whole one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from framework.clean_up import GrowingCleanUp, clean_up


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.text(alphabet="  n'tsmvre.x", max_size=3), max_size=12))
def test_parts_concatenate_to_the_whole_text(parts):
    growing, shown = GrowingCleanUp(), ""
    for i, part in enumerate(parts):
        shown += growing.add(part)
        assert shown + growing.rest == clean_up("".join(parts[: i + 1]))


def test_words_are_given_out_once_the_next_one_begins():
    growing = GrowingCleanUp()
    assert [growing.add(part) for part in ("it", " is", " n", " '", " t", " so")] == ["", "it", " is", "", "", "n't"]
    assert growing.rest == " so"
