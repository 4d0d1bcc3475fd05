"""Stop strings in a growing text: which one counts, and what may be shown before it is known."""

from hypothesis import given, settings
from hypothesis import strategies as st

from framework.engine.stop import StopStrings

SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


def shown(stops, parts, include=False):
    watch, out = StopStrings(stops, include), []
    for part in parts:
        out.append(watch.add(part))
        if watch.match is not None:
            return out, watch.match
    return [*out, watch.finish()], None


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(SHORT, min_size=1, max_size=3),
    parts=st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
    include=st.booleans(),
    passed=st.integers(0, 3),
)
def test_text_is_cut_where_a_search_of_the_whole_text_cuts_it(stops, parts, include, passed):
    watch, text, out = StopStrings(stops, include), "", ""
    for number, part in enumerate(parts):
        known, text = len(text), text + part
        out += watch.add(part, may_match=number >= passed)
        there = [(text.find(s, max(0, known - len(s) + 1)), -len(s), s) for s in stops]
        at, _, stop = min([t for t in there if t[0] >= 0], default=(None, 0, None))
        if number >= passed and stop is not None:
            assert (watch.match, out) == (stop, text[: at + (len(stop) if include else 0)])
            return
        assert watch.match is None and text.startswith(out)
    assert out + watch.finish() == text


def test_no_part_of_a_stop_string_is_shown():
    assert shown(["STOP"], ["a S", "TO", "P b"]) == (["a ", "", ""], "STOP")
    assert shown(["STOP"], ["a S", "TO", "RY"]) == (["a ", "", "STORY", ""], None)
    assert shown(["STOP"], ["a ST"]) == (["a ", "ST"], None)


def test_stop_string_that_begins_first_counts_then_the_longest():
    assert shown(["b", "abc"], ["xabcd"]) == (["x"], "abc")
    assert shown(["ab", "abc"], ["xabcd"]) == (["x"], "abc")
    assert shown(["ab", "abc"], ["xa", "b", "c"])[1] == "ab"  # it is whole before the other one


def test_text_holds_the_stop_string_and_nothing_behind_it_when_asked():
    assert shown(["STOP"], ["a ST", "OP b"], include=True) == (["a ", "STOP"], "STOP")


def test_stop_string_that_begins_again_before_it_was_whole_is_found():
    assert shown(["aabc"], ["aab", "aab", "c"]) == (["", "aab", ""], "aabc")


def test_what_is_whole_too_early_is_passed_over_and_not_found_later():
    watch = StopStrings(["ab"], False)
    assert [watch.add("xab", may_match=False), watch.add("c"), watch.add("ab")] == ["xab", "c", ""]
    assert watch.match == "ab"


def test_stop_string_may_cross_the_point_from_which_it_counts():
    watch = StopStrings(["ab"], False)
    assert [watch.add("xa", may_match=False), watch.add("b")] == ["x", ""]
    assert watch.match == "ab"


def test_text_that_may_still_change_counts_for_a_match_and_is_not_shown():
    watch = StopStrings(["it is"], False)
    assert [watch.add("", "it"), watch.add("it", " is")] == ["", ""]
    assert watch.match == "it is"
