"""Outputs as they are made: `stream=True` and AsyncLLM, against what the plain call returns."""

import asyncio
from itertools import pairwise

import pytest

from framework import AsyncLLM, SamplingParams

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=64")
PARAMS = SamplingParams(temperature=1.2, seed=3, max_tokens=12, logprobs=1, ignore_eos=True)
CHAT = [{"role": "user", "content": "w4 w6"}]


@pytest.fixture(scope="module")
def aio(folders, steps):
    with AsyncLLM(folders["mixed"], overrides=[*SMALL, steps]) as llm:
        yield llm


async def outputs_of(aio, prompt, params):
    return [o async for o in aio.generate(prompt, params)]


def streams(mixed, aio, prompt, params):
    """The same request through both doors."""
    yield list(mixed.generate(prompt, params, stream=True))
    yield asyncio.run(outputs_of(aio, prompt, params))


def test_cumulative_outputs_grow_to_the_plain_one(mixed, aio):
    (plain,) = mixed.generate("w4 w6", PARAMS)
    for outputs in streams(mixed, aio, "w4 w6", PARAMS):
        assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 13))
        assert [o.finished for o in outputs] == [False] * 11 + [True]
        texts = [o.outputs[0].text for o in outputs]
        assert all(after.startswith(before) for before, after in pairwise(texts))
        last = outputs[-1].outputs[0]
        assert (last.text, last.token_ids) == (plain.outputs[0].text, plain.outputs[0].token_ids)
        assert list(last.logprobs) == list(plain.outputs[0].logprobs)


def test_deltas_concatenate_to_the_plain_output(mixed, aio):
    (plain,) = mixed.generate("w4 w6", PARAMS)
    for outputs in streams(mixed, aio, "w4 w6", PARAMS.replace(output_kind="delta")):
        deltas = [o.outputs[0] for o in outputs]
        assert "".join(d.text for d in deltas) == plain.outputs[0].text
        assert [i for d in deltas for i in d.token_ids] == plain.outputs[0].token_ids
        assert [entry for d in deltas for entry in d.logprobs] == list(plain.outputs[0].logprobs)


def test_final_kind_gives_one_output(mixed, aio):
    (plain,) = mixed.generate("w4 w6", PARAMS)
    for outputs in streams(mixed, aio, "w4 w6", PARAMS.replace(output_kind="final")):
        assert [o.outputs[0].text for o in outputs] == [plain.outputs[0].text]


def test_chat_streams_as_well(mixed):
    (plain,) = mixed.chat(CHAT, PARAMS)
    *_, last = mixed.chat(CHAT, PARAMS, stream=True)
    assert (last.prompt, last.outputs[0].text) == (plain.prompt, plain.outputs[0].text)


def test_id_of_the_caller_is_the_requests(aio):
    async def main():
        return [o.request_id async for o in aio.generate("w4", PARAMS, "mine")]

    assert set(asyncio.run(main())) == {"mine"}


def test_breaking_off_aborts(aio):
    async def main():
        async for _ in aio.generate("w4", PARAMS.replace(max_tokens=60)):
            break
        return await aio.stats()

    stats = asyncio.run(main())
    assert (stats["num_running"], stats["num_free_blocks"]) == (0, stats["num_blocks"] - 1)
