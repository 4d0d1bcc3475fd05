"""The `openai` client, sync and async, against the running server: what it parses, and which errors it raises."""

from __future__ import annotations

import asyncio
import json

import pytest

from .asking import ANSWER, FRANCE, TOOL, WEATHER, City, installed, is_weather

pytestmark = installed("openai")


@pytest.fixture(scope="module")
def client(served):
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client, served):
    """A chat about France, greedy and short where the test does not say otherwise."""

    def ask(messages=FRANCE, **more):
        given = {"model": served.model, "temperature": 0, "max_completion_tokens": 16, **more}
        return client.chat.completions.create(messages=messages, **given)

    return ask


@pytest.fixture(scope="module")
def complete(client, served):
    def complete(prompt, **more):
        return client.completions.create(prompt=prompt, **{"model": served.model, "temperature": 0, **more})

    return complete


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_models_list_has_the_one_that_is_served(client, served):
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).id == served.model


def test_chat_answers(ask):
    answer = ask()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_gives_the_text_and_the_usage_of_the_whole(ask):
    whole, chunks = ask(), list(ask(stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_that_is_left_leaves_nothing_running(ask, served):
    with ask(stream=True, max_completion_tokens=400, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    left = served.wait_until(lambda found: not found["framework:num_requests_running"])
    assert left["framework:num_requests_running"] == 0


def test_many_of_the_async_client_at_once_get_what_one_gets(served, ask):
    import openai

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(6)))

    async def one(client):
        stream = await client.chat.completions.create(
            messages=FRANCE, model=served.model, temperature=0, max_completion_tokens=16, stream=True
        )
        return text_of([chunk async for chunk in stream])

    assert asyncio.run(all_at_once()) == [ANSWER] * 6


def test_logprobs_are_those_of_the_tokens_of_the_text(ask):
    choice = ask(logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    said = b"".join(bytes(entry.bytes) for entry in entries if entry.token != "<|im_end|>").decode()
    assert said == choice.message.content
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert entry.logprob == best[0], "a greedy token is the best one"


def test_n_gives_choices_that_a_seed_gives_again(ask):
    def texts():
        answer = ask(n=3, seed=7, temperature=1.5, max_completion_tokens=8)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert texts() == texts() and len(set(texts())) > 1


def test_stop_string_ends_the_text_before_it(ask):
    answer = ask(stop=["Paris"])
    assert answer.choices[0].message.content == ANSWER.partition("Paris")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_end_with_length(ask):
    answer = ask(max_completion_tokens=3)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_parse_gives_the_object_of_a_pydantic_class(client, served):
    answer = client.chat.completions.parse(
        messages=FRANCE, model=served.model, temperature=0, max_completion_tokens=60, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_streamed_json_schema_is_valid_json(ask):
    schema = {"name": "city", "strict": True, "schema": City.model_json_schema()}
    given = {"type": "json_schema", "json_schema": schema}
    City.model_validate_json(text_of(ask(response_format=given, stream=True, max_completion_tokens=60)))


def test_named_tool_is_called(ask):
    choice = ask(WEATHER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}},
                 max_completion_tokens=60).choices[0]  # fmt: skip
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and is_weather(call.function.arguments)


def test_streamed_call_is_the_whole_one(ask):
    given = {"tools": [TOOL], "tool_choice": "required", "max_completion_tokens": 80}
    whole = ask(WEATHER, **given).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(WEATHER, stream=True, **given) if chunk.choices]
    parts = [call for chunk in chunks for call in chunk.delta.tool_calls or () if call.index == 0]
    assert parts[0].id and "".join(part.function.name or "" for part in parts) == "weather"
    arguments = "".join(part.function.arguments or "" for part in parts)
    assert json.loads(arguments) == json.loads(whole.message.tool_calls[0].function.arguments)
    assert chunks[-1].finish_reason == whole.finish_reason


def test_result_of_a_tool_is_taken_back(ask):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
    ]
    assert ask(turns, tools=[TOOL], tool_choice="none").choices[0].message.content


def test_completions_of_texts_and_of_ids_agree(client, served, complete):
    prompt = "The capital of France is"
    ids = client.post("/../tokenize", body={"prompt": prompt}, cast_to=object)["tokens"]
    texts = [choice.text for choice in complete([prompt, prompt], max_tokens=4).choices]
    assert (
        texts[0]
        == texts[1]
        == complete(ids, max_tokens=4).choices[0].text
        == complete([ids], max_tokens=4).choices[0].text
    )
    streamed = "".join(chunk.choices[0].text for chunk in complete(prompt, max_tokens=4, stream=True) if chunk.choices)
    assert streamed == texts[0]


def test_echo_gives_the_prompt_with_its_logprobs(complete):
    prompt = "The capital of France is Paris"
    choice = complete(prompt, max_tokens=1, echo=True, logprobs=1).choices[0]
    told = choice.logprobs
    assert choice.text.startswith(prompt) and "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in told.token_logprobs[1:])
    offsets = [sum(map(len, told.tokens[:place])) for place in range(len(told.tokens))]
    assert told.text_offset == offsets


def test_fields_of_our_own_travel_in_the_extra_body(ask):
    answer = ask(temperature=1.9, seed=1, extra_body={"top_k": 1})
    assert answer.choices[0].message.content == ANSWER, "top_k=1 is greedy whatever the temperature"


def test_responses_give_text_whole_and_streamed(client, served):
    given = {"model": served.model, "input": FRANCE[0]["content"], "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert whole.output_text == ANSWER and whole.status == "completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER


BAD = {
    "an unknown model": ({"model": "gpt-4"}, "NotFoundError", "model"),
    "a temperature below 0": ({"temperature": -1}, "BadRequestError", "temperature"),
    "a prompt that is too long": ({"messages": [{"role": "user", "content": "a " * 2000}]}, "BadRequestError", None),
    "no messages": ({"messages": []}, "BadRequestError", "messages"),
    "more choices than there may be": ({"n": 100_000}, "BadRequestError", "n"),
    "an unknown field": ({"extra_body": {"temprature": 1}}, "BadRequestError", "temprature"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
                 "BadRequestError", None),
    "a schema that is none": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
                              "BadRequestError", None),
}  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", BAD)
def test_errors_are_those_of_the_client(case, is_stream, ask):
    import openai

    given, kind, param = BAD[case]
    with pytest.raises(getattr(openai, kind)) as error:
        ask(**given, stream=is_stream)
    assert error.value.body["message"] and error.value.type
    if param is not None:
        assert error.value.param == param


def test_a_path_that_is_not_served_is_not_found(client, served):
    import openai

    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=served.model, input="a")
