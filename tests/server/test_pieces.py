"""A reader who is behind gets what has come meanwhile in one piece, and nothing of it twice or not at all."""

import asyncio
import dataclasses

import pytest

from framework import AsyncLLM, SamplingParams
from framework.config import compose
from framework.request import CompletionOutput, RequestMetrics, RequestOutput
from framework.server import generating
from framework.server.errors import ApiError
from framework.server.reply import Pieces

from .here import SMALL


def output(*completions, finished=False):
    return RequestOutput("r", "w5", [1, 5], None, list(completions), finished, 0, RequestMetrics(0.0))


def delta(index, text, ids, reason=None):
    return CompletionOutput(index, text, ids, finish_reason=reason)


def told(pieces, *placed):
    return [(p.index, p.text, list(p.token_ids), p.finish_reason) for p in pieces.of(list(placed))]


def test_outputs_of_one_completion_become_one_piece():
    pieces = Pieces(1)
    first, second = output(delta(0, "a", [7])), output(delta(0, "b", [8, 9], "stop"), finished=True)
    assert told(pieces, (0, first), (0, second)) == [(0, "ab", [7, 8, 9], "stop")]
    assert pieces.usage.fields()["completion_tokens"] == 3 and pieces.usage.fields()["prompt_tokens"] == 2


def test_completion_that_has_ended_is_told_of_once():
    pieces = Pieces(2)
    assert told(pieces, (0, output(delta(0, "a", [7], "stop"), delta(1, "b", [8])))) == [
        (0, "a", [7], "stop"),
        (1, "b", [8], None),
    ]
    assert told(pieces, (0, output(delta(0, "", [], "stop"), delta(1, "c", [9])))) == [(1, "c", [9], None)]


def test_an_end_that_comes_with_later_outputs_of_others_is_kept():
    pieces = Pieces(2)
    first = output(delta(0, "a", [7], "length"), delta(1, "b", [8]))
    second = output(delta(0, "", [], "length"), delta(1, "c", [9]))
    assert told(pieces, (0, first), (0, second)) == [(0, "a", [7], "length"), (1, "bc", [8, 9], None)]


def test_prompts_are_counted_once_and_choices_go_on_from_prompt_to_prompt():
    pieces = Pieces(2)
    assert told(pieces, (0, output(delta(1, "a", [7]))), (1, output(delta(0, "b", [8])))) == [
        (1, "a", [7], None),
        (2, "b", [8], None),
    ]
    assert pieces.usage.fields()["prompt_tokens"] == 4


def test_outputs_that_wait_are_taken_in_one_go(bare):
    async def run():
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind="delta", detokenize=False)
        with AsyncLLM(config=compose([f"model.path={bare}", *SMALL])) as llm:
            stream = llm.generate([5], params)
            assert stream.waiting() == []
            ids = list((await anext(stream)).outputs[0].token_ids)
            while (await llm.stats())["num_running"]:
                await asyncio.sleep(0.01)
            late = stream.waiting()
            ids += [i for one in late for i in one.outputs[0].token_ids]
            assert len(late) > 1 and late[-1].finished and stream.waiting() == []
            assert [one async for one in stream] == []
        return ids

    assert asyncio.run(run()) == list(range(6, 18))


class Behind:
    """A stream of an engine whose outputs have all come before they are read."""

    def __init__(self, *outputs):
        self._outputs = list(outputs)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._outputs:
            raise StopAsyncIteration
        return self._outputs.pop(0)

    def waiting(self):
        found, self._outputs = self._outputs, []
        return found

    async def aclose(self):
        pass


class Canned:
    def __init__(self, *streams):
        self._streams = list(streams)

    def generate(self, prompt, params, request_id):
        return self._streams.pop(0)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_stands_before_a_failure_is_told_before_it(num_prompts):
    failed = dataclasses.replace(output(delta(0, "", [], "abort"), finished=True), error="no tape")
    streams = [Behind(output(delta(0, "a", [7])), failed) for _ in range(num_prompts)]
    seen = []

    async def run():
        asked = generating.Asked("r", ["w5"] * num_prompts, SamplingParams())
        async for placed in generating.pieces(Canned(*streams), asked):
            seen.extend(one.outputs[0].text for _, one in placed)

    with pytest.raises(ApiError, match="no tape"):
        asyncio.run(run())
    assert seen[0] == "a" and set(seen) == {"a"}
