"""Calls in texts that come in pieces: the same for every way to cut them, and given as early as they are known."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.server.tool_calls import FORMATS, ArgumentsDelta, CallStarted, TextDelta
from framework.server.tool_calls.tool_format import collected

_PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "[ARGS]", "[CALL_ID]ab",
    '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}', '{"name": "g", "parameters": {}}', '{"name": "f"', '"x"',
    '{"arguments": {"a": 1}, "name": "f"}', ', "arguments": {', '"a": ', "1.5", "{", "}", "[", "]", ",", ";", '"',
    "\\", "\\u00e9", " ", "\n", "f", "Hello", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(_PIECES), max_size=14).map("".join)


def streamed(stream, text, cuts):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    events = [e for i, j in itertools.pairwise(places) for e in stream.feed(text[i:j])]
    return events + stream.finish()


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=120, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 120), max_size=12))
def test_every_way_to_cut_a_text_gives_the_same(name, forced, text, cuts):
    one = FORMATS[name]
    whole = one.parse(text, forced=forced)
    assert collected(streamed(one.stream(forced=forced), text, cuts)) == whole
    assert collected(streamed(one.stream(forced=forced), text, range(len(text)))) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_text_without_calls_is_given_whole(name, text):
    content, calls = FORMATS[name].parse(text)
    if not calls:
        assert content == text


@settings(max_examples=60, deadline=None)
@given(
    said=st.text("ab <{[\n", max_size=12),
    calls=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=8) | st.integers()), max_size=3),
    after=st.text("ab <{[", max_size=8),
)
def test_any_arguments_come_back_as_they_were_written(said, calls, after):
    one = FORMATS["hermes"]
    arguments = [json.dumps(call) for call in calls]
    body = "".join(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>' for text in arguments)
    content, found = one.parse(said + body + after)
    assert [call.arguments for call in found] == arguments
    assert "".join((content or "").split()) == "".join((said + after).split())


def test_text_is_given_up_to_what_may_begin_a_call():
    stream = FORMATS["hermes"].stream()
    assert stream.feed("Hello <to") == [TextDelta("Hello")]
    assert stream.feed("y> x") == [TextDelta(" <toy> x")]


def test_call_starts_with_its_arguments_and_these_come_as_they_are_written():
    stream = FORMATS["hermes"].stream()
    assert stream.feed('<tool_call>{"name": "f", "arguments"') == []
    assert stream.feed(': {"a"') == [CallStarted(0, "f"), ArgumentsDelta(0, '{"a"')]
    assert stream.feed(": 1}") == [ArgumentsDelta(0, ": 1}")]
    assert stream.feed('}</tool_call><tool_call>{"name": "g", "arguments": {}') == [
        CallStarted(1, "g"),
        ArgumentsDelta(1, "{}"),
    ]
    assert stream.feed("}</tool_call>") + stream.finish() == []


def test_call_whose_name_comes_last_starts_when_it_is_whole():
    stream = FORMATS["hermes"].stream()
    assert stream.feed('<tool_call>{"arguments": {"a": 1}, "name": "f"') == []
    assert stream.feed("}") == [CallStarted(0, "f"), ArgumentsDelta(0, '{"a": 1}')]


def test_many_marks_are_read_in_time_that_grows_with_the_text():
    """Ten times the text would take a hundred times as long if each mark had the rest read again."""
    text = '<tool_call>{"a": "' * 3000 + "<function=f>" + "<parameter=a></parameter>" * 3000
    for one in FORMATS.values():
        assert one.parse(text) == (text, [])
