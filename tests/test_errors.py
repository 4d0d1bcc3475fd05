"""Errors say what was typed in one line, whatever was typed."""

import pickle

import pytest

from framework.config import ComponentConfig, Config, EngineOptions, KVCacheConfig, SchedulerConfig, build_options
from framework.errors import ConfigError, FrameworkError, StageError, as_typed, class_and_text, first_line
from framework.plugins import registry


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("a plain sentence", "a plain sentence"),
        ("two\nlines", "two lines"),
        ("  first\r\n\n\tsecond \u2028 third\n", "first second third"),
        ("a bell \a and half a pair \ud800", r"a bell \x07 and half a pair \ud800"),
        ("漢字 stay", "漢字 stay"),
    ],
)
def test_a_message_is_one_line_that_can_be_shown(message, line):
    assert str(FrameworkError(message)) == line


def test_an_error_travels_between_processes_as_it_is():
    error = pickle.loads(pickle.dumps(StageError("two\nlines", "top_k", "r1")))
    assert (str(error), error.stage, error.request_id) == ("two lines", "top_k", "r1")
    assert str(pickle.loads(pickle.dumps(ConfigError("x=1: no")))) == "x=1: no"


@pytest.mark.parametrize(
    ("value", "text"),
    [("foo", "foo"), ("漢 字", "漢 字"), ("two\nlines", r"'two\nlines'"), (3, "3"), (1.5, "1.5"), (None, "None")],
)
def test_a_word_looks_as_it_is_typed_where_it_can(value, text):
    assert as_typed(value) == text


def test_a_long_value_is_shortened_and_a_number_without_digits_named():
    assert len(as_typed("x" * 10**6)) < 200
    assert as_typed(10**5000) == "a value of type int"


def test_a_librarys_error_is_told_by_its_first_line_or_by_class_and_text():
    error = ValueError("first\nsecond")
    assert (first_line(error), class_and_text(error)) == ("first", "ValueError: first second")
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineOptions(dtype="two\nlines"), r"engine.dtype='two\nlines': there is no such choice."),
        (lambda: EngineOptions(dtype="foo"), "engine.dtype=foo: there is no such choice."),
        (lambda: EngineOptions(max_model_len=10**5000), "engine.max_model_len=a value of type int is too large."),
        (lambda: EngineOptions(seed=2**64), "engine.seed=18446744073709551616 is outside of"),
        (lambda: KVCacheConfig(dtype="fp\n8"), r"kv_cache.dtype='fp\n8' is not built yet."),
        (lambda: KVCacheConfig(num_blocks=2**63), "kv_cache.num_blocks=9223372036854775808 is too large."),
        (lambda: SchedulerConfig(max_num_seqs=-(10**5000)), "scheduler.max_num_seqs=a value of type int is too small."),
        (lambda: Config(spec_decode=ComponentConfig("a\tb")), r"spec_decode='a\tb' is not built yet."),
        (lambda: registry().spec("executor", "two\nlines"), r"executor='two\nlines': no installed plugin provides it."),
        (lambda: build_options(None, {"a\nb": 1}, "x=y"), r"x=y.'a\nb': there is no such key."),
    ],
)  # fmt: skip
def test_what_a_user_wrote_is_one_line_of_the_refusal(make, message):
    with pytest.raises(FrameworkError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
