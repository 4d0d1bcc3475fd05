"""What an OutputState makes of what it is told: one output a step, late tokens left out, endings of each completion."""

import pytest

from framework import SamplingParams
from framework.engine.output import OutputState
from framework.request import NewTokens, Request

from ..tokenizer.backends import made


def state_of(tokenizer=None, **params):
    params = SamplingParams(detokenize=tokenizer is not None, **params)
    return OutputState(Request("r", [3, 4], params, seed=1, max_total_tokens=40), tokenizer, 0.0)


def tell(state, *news, now=1.0):
    """Outputs of one step that gives these (index, token ids, finish reason, error) to requests of the state."""
    made_ = [
        state.add(NewTokens(state.requests[i], ids, reason, error=error), None, now, more=place + 1 < len(news))
        for place, (i, ids, reason, error) in enumerate(news)
    ]
    return [output for output in made_ if output is not None]


def test_a_step_gives_one_output_with_the_completions_in_order():
    state = state_of(n=3, output_kind="delta")
    (output,) = tell(state, (2, [7], None, None), (0, [8], None, None))
    assert [(c.index, c.token_ids) for c in output.outputs] == [(0, [8]), (1, []), (2, [7])]
    (output,) = tell(state, (1, [9], None, None))
    assert [c.token_ids for c in output.outputs] == [[], [9], []]


def test_final_output_comes_with_the_last_ending():
    state = state_of(n=2)
    assert tell(state, (0, [7], "length", None)) == [] and not state.is_finished
    (output,) = tell(state, (1, [7], "stop", None))
    assert output.finished and [c.finish_reason for c in output.outputs] == ["length", "stop"]


def test_fault_of_one_completion_is_told_and_the_others_go_on():
    state = state_of(n=2)
    assert tell(state, (0, [], "error", "no token is left"), (1, [7], None, None)) == []
    (output,) = tell(state, (1, [8], "length", None))
    assert output.error == "no token is left"
    assert [(c.finish_reason, c.token_ids) for c in output.outputs] == [("error", []), ("length", [7, 8])]


@pytest.mark.parametrize("kind", ["final", "delta"])
def test_what_comes_behind_a_stop_string_is_left_out_and_the_scheduler_is_to_be_told_once(kind):
    tokenizer = made("byte_level")
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    state = state_of(tokenizer, n=2, stop="b", output_kind=kind)
    tell(state, (0, [a, b, a], None, None), (1, [a], None, None))
    assert state.take_stopped() == [("r", "b")] and state.take_stopped() == []
    assert tell(state, (0, [a], None, None)) == []
    (output,) = tell(state, (1, [b], "length", None))
    assert state.take_stopped() == [("r\x1f1", "b")]
    assert [(c.finish_reason, c.stop_reason) for c in output.outputs] == [("stop", "b")] * 2
    if kind == "final":
        assert [(c.text, c.token_ids) for c in output.outputs] == [("a", [a, b])] * 2
    assert tell(state, (1, [a], None, None)) == []


def test_deltas_of_text_that_is_held_back_add_up():
    tokenizer = made("byte_level")
    ids = tokenizer.encode("é 😀 done")
    state, texts = state_of(tokenizer, output_kind="delta", stop="donkey"), []
    for place, token in enumerate(ids):
        (output,) = tell(state, (0, [token], "length" if place + 1 == len(ids) else None, None))
        texts.append(output.outputs[0].text)
    assert "".join(texts) == "é 😀 done" and "\ufffd" not in "".join(texts)


def test_cumulative_outputs_do_not_change_when_more_comes():
    tokenizer = made("byte_level")
    a = tokenizer.token_to_id("a")
    state = state_of(tokenizer, output_kind="cumulative")
    (first,) = tell(state, (0, [a], None, None))
    (second,) = tell(state, (0, [a], "length", None))
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("a", [a])
    assert (second.outputs[0].text, second.outputs[0].token_ids) == ("aa", [a, a])
