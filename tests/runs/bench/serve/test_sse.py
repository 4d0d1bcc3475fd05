"""The parser of server-sent events gives the same for any cut of the bytes, and what the standard says."""

from hypothesis import given
from hypothesis import strategies as st

from framework.runs.bench.serve.sse import EventParser

STREAMS = st.lists(
    st.sampled_from(
        [
            "data: {}",
            "data:x",
            "data",
            "data:  two",
            ": kept alive",
            "event: a",
            "id: 1",
            "data: é漢",
            "",
            "\ufeffdata: b",
        ]
    ),
    max_size=20,
)


def parsed(text, cuts=()):
    parser, found, at = EventParser(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += parser.feed(text[at:cut])
        at = max(at, cut)
    return found, parser


@given(STREAMS, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 300), max_size=30))
def test_events_do_not_depend_on_where_the_bytes_are_cut(lines, end, cuts):
    text = "".join(line + end for line in lines).encode() + b"\n"
    cuts = [cut for cut in cuts if cut <= len(text)]
    assert parsed(text, cuts)[0] == parsed(text)[0] == parsed(text, range(len(text)))[0]


def test_events_end_at_an_empty_line_and_keep_what_stands_behind_data():
    text = b'data: {"a": 1}\n\ndata:x\r\n\r\ndata:  y\n\n'
    assert parsed(text)[0] == ['{"a": 1}', "x", " y"]


def test_data_lines_of_one_event_are_joined():
    assert parsed(b"data: a\ndata\ndata: b\n\n")[0] == ["a\n\nb"]


def test_comments_and_other_fields_make_no_event():
    assert parsed(b": ping\n\nevent: x\nid: 3\nretry: 5\n\ndata: z\nevent: x\n\n")[0] == ["z"]


def test_byte_order_mark_is_passed_over_at_the_beginning_alone():
    assert parsed(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")[0] == ["a"]


def test_event_that_has_not_ended_is_open_and_not_told():
    events, parser = parsed(b"data: a\n\ndata: b\n")
    assert events == ["a"] and parser.is_open
    assert parser.feed(b"\n") == ["b"] and not parser.is_open


def test_character_cut_in_two_arrives_whole():
    text = "data: 漢\n\n".encode()
    assert parsed(text, [7])[0] == ["漢"]
