"""`/v1/responses` as OpenAI's own client reads it: items, typed events, functions, stored responses, refusals."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`"),
    pytest.mark.skipif(
        find_spec("openai") is None, reason="openai is not installed; it comes with the extra `clients`"
    ),
]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}"
    "\n{% endfor %}{{ messages[-1].content }}"
)
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
SCRIPTS = {
    "<hi>": ["Hello", " there", ", you."],
    "<weather>": ["Let me see.\n", "<tool_call>\n", '{"name": "get_weather", ', '"arguments": {"ci', 'ty": "Rome"}}',
                  "\n</tool_call>"],
    "<two>": [f"<tool_call>{CALL}</tool_call>", f"\n<tool_call>{CALL}</tool_call>"],
    "dry": ["It is dry."],
    "<on>": [f"la{'.' * i} " for i in range(40)],  # each piece leads to one other
}  # fmt: skip
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    from .here import serving
    from .scripted import save_scripted

    folder = save_scripted(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, TEMPLATE)
    with serving(folder, "sampler.temperature=0", model_name="scripted") as here:
        yield here


@pytest.fixture(scope="module")
def client(here):
    import openai

    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client, given="<hi>", **more):
    return client.responses.create(model="scripted", input=given, **more)


def kinds(events):
    return [event.type for event in events]


# ---------------------------------------------------------------------------------------------------------------- text


def test_text_is_one_message_with_usage(client):
    found = create(client)
    assert found.output_text == "Hello there, you." and found.status == "completed" and found.object == "response"
    [message] = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert found.usage.output_tokens == 4 and found.usage.total_tokens == found.usage.input_tokens + 4
    assert found.usage.output_tokens_details.reasoning_tokens == 0
    assert found.usage.input_tokens_details.cached_tokens >= 0
    assert found.incomplete_details is None and found.error is None and found.model == "scripted"


def test_answer_fits_the_types_of_the_client(client):
    from openai.types.responses import Response

    raw = client.responses.with_raw_response.create(model="scripted", input="<weather>", tools=[WEATHER])
    Response.model_validate_json(raw.text)


def test_instructions_and_items_of_messages_are_the_conversation(client):
    plain = create(client, "<hi>")
    parts = [{"type": "input_text", "text": "<h"}, {"type": "input_text", "text": "i>"}]
    assert create(client, [{"role": "user", "content": parts}]).output_text == plain.output_text
    longer = create(client, [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "<hi>"}])
    assert longer.usage.input_tokens == plain.usage.input_tokens + len("system: Be kind.")
    instructed = create(client, "<hi>", instructions="Be kind.")
    assert instructed.usage.input_tokens == longer.usage.input_tokens and instructed.instructions == "Be kind."


def test_answer_that_is_cut_off_is_incomplete(client):
    found = create(client, "<on>", max_output_tokens=3)
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete" and found.usage.output_tokens == 3


def test_sampling_parameters_are_those_of_the_request(client):
    found = create(client, temperature=0.5, top_p=0.9, metadata={"a": "b"}, extra_body={"top_k": 1})
    assert (found.temperature, found.top_p, found.metadata) == (0.5, 0.9, {"a": "b"})
    assert found.output_text == "Hello there, you."


def test_text_of_a_schema_validates(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    found = create(client, text={"format": {"type": "json_schema", "name": "thing", "schema": schema}})
    assert json.loads(found.output_text)["a"] in ("x", "y")
    assert found.text.format.name == "thing" and found.text.format.schema_ == schema


def test_logprobs_stand_beside_the_text(client):
    found = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = found.output[0].content[0].logprobs
    assert [one.token for one in logprobs][:3] == ["Hello", " there", ", you."]
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in logprobs)
    events = list(create(client, include=["message.output_text.logprobs"], top_logprobs=2, stream=True))
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.logprob for one in told] == [one.logprob for one in logprobs][: len(told)] and len(told) >= 3
    assert len(events[-1].response.output[0].content[0].logprobs) == len(logprobs)


# -------------------------------------------------------------------------------------------------------------- events


def test_events_of_a_text_come_in_their_order(client):
    events = list(create(client, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Hello there, you."
    assert kinds(e for e in events if e not in deltas) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    last = events[-1].response
    assert last.output_text == "Hello there, you." and last.usage.output_tokens == 4
    assert {event.item_id for event in deltas} == {last.output[0].id} and last.id == events[0].response.id


def test_stream_ends_with_its_last_event_alone(client):
    with client.responses.with_streaming_response.create(model="scripted", input="<hi>", stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-2] == "event: response.completed" and json.loads(lines[-1].removeprefix("data: "))
    assert not any("[DONE]" in line for line in lines)


def test_stream_that_is_cut_off_ends_incomplete(client):
    events = list(create(client, "<on>", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.usage.output_tokens == 3


def test_stream_that_fails_on_the_way_ends_with_what_happened(here, client):
    import asyncio

    long = {"ignore_eos": True, "min_tokens": 3000}
    with create(client, "<on>", stream=True, max_output_tokens=3000, extra_body=long) as stream:
        first = next(stream)
        asyncio.run(here.service.llm.abort(first.response.id))
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and "aborted" in last.response.error.message
    here.wait_until_idle()


def test_client_that_breaks_off_frees_the_engine(here, client):
    long = {"ignore_eos": True, "min_tokens": 3000}
    stream = create(client, "<on>", stream=True, max_output_tokens=3000, extra_body=long)
    next(stream)
    stream.close()
    here.wait_until_idle()


def test_events_of_a_call_come_in_their_order(client):
    events = list(create(client, "<weather>", tools=[WEATHER], stream=True))
    told = [kind for kind in kinds(events) if not kind.endswith(".delta")]
    assert told[2:] == [
        "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.output_item.added",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Rome"}'  # in as many pieces as the reader was fast
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_stream_helper_of_the_client_puts_the_answer_together(client):
    with client.responses.stream(model="scripted", input="<weather>", tools=[WEATHER]) as stream:
        for _ in stream:
            continue
        found = stream.get_final_response()
    assert found.output_text == "Let me see." and found.output[1].arguments == '{"city": "Rome"}'


def test_client_reads_a_text_into_a_model_of_pydantic(client):
    from typing import Literal

    from pydantic import BaseModel, ConfigDict

    class Thing(BaseModel):
        model_config = ConfigDict(extra="forbid")
        a: Literal["x", "y"]

    found = client.responses.parse(model="scripted", input="<hi>", text_format=Thing)
    assert isinstance(found.output_parsed, Thing)


# ----------------------------------------------------------------------------------------------------------- functions


def test_call_of_a_function_is_an_item(client):
    found = create(client, "<weather>", tools=[WEATHER])
    message, call = found.output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Rome"} and call.call_id.startswith("call_")
    assert found.tools[0].name == "get_weather" and found.tool_choice == "auto"


def test_result_of_a_call_goes_back_as_an_item(client):
    first = create(client, "<weather>", tools=[WEATHER])
    given = [{"role": "user", "content": "<weather>"}, *(item.model_dump() for item in first.output)]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "dry"}
    assert create(client, [*given, result], tools=[WEATHER]).output_text == "It is dry."


def test_several_calls_are_several_items_unless_parallel_ones_are_off(client):
    found = create(client, "<two>", tools=[WEATHER])
    assert [item.type for item in found.output] == ["function_call"] * 2
    assert found.output[0].call_id != found.output[1].call_id
    assert len(create(client, "<two>", tools=[WEATHER], parallel_tool_calls=False).output) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_call_that_is_asked_for_comes_and_is_valid(client, choice):
    found = create(client, "<hi>", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    [call] = found.output
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_without_tools_or_with_the_choice_of_none_calls_are_text(client):
    assert "<tool_call>" in create(client, "<weather>").output_text
    assert "<tool_call>" in create(client, "<weather>", tools=[WEATHER], tool_choice="none").output_text


# -------------------------------------------------------------------------------------------------------------- stored


def test_stored_response_can_be_followed_read_and_deleted(client):
    import openai

    first = create(client, "<weather>", tools=[WEATHER], store=True)
    assert client.responses.retrieve(first.id).output[1].call_id == first.output[1].call_id
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "dry"}
    second = create(client, [result], previous_response_id=first.id, tools=[WEATHER], store=True)
    assert second.output_text == "It is dry." and second.previous_response_id == first.id
    third = create(client, "<hi>", previous_response_id=second.id)
    assert third.usage.input_tokens > create(client, "<hi>").usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)


def test_response_is_not_kept_unless_that_is_asked_for(client):
    import openai

    found = create(client)
    with pytest.raises(openai.NotFoundError, match="none is kept without store=true") as caught:
        create(client, previous_response_id=found.id)
    assert caught.value.param == "previous_response_id" and caught.value.code == "response_not_found"


def test_calls_that_follow_a_stored_response_are_not_added_to_it():
    from framework.server.responses_input import messages_of

    def call(i):
        return {"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"}

    stored = messages_of([call("a")])
    later = messages_of([call("b"), {"type": "function_call_output", "call_id": "a", "output": "1"}], stored)
    assert [one["id"] for one in stored[0]["tool_calls"]] == ["a"]
    assert [one["id"] for one in later[0]["tool_calls"]] == ["a", "b"]


def test_store_gives_the_oldest_up():
    from framework.server.responses_store import ResponseStore, Stored

    store = ResponseStore(most=2, most_characters=200)
    for name in "abc":
        store.keep(Stored({"id": name}, [{"content": name}]))
    assert store.get("a") is None and store.get("b") is not None and store.get("c") is not None
    store.keep(Stored({"id": "long"}, [{"content": "x" * 300}]))
    assert [store.get(name) for name in ("b", "c", "long")] == [None] * 3
    store.keep(Stored({"id": "wide", "tools": ["x" * 300]}, []))
    assert store.get("wide") is None
    store.keep(Stored({"id": "d"}, [{"content": "x"}]))
    assert store.get("d") is not None


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions are served"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, None, "must be a name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "use none, auto, required"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, None, "Did you mean"),
        ({"background": True}, "background", "background is not served; leave it out"),
        ({"conversation": "c"}, "conversation", "use previous_response_id"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "chat_template_kwargs"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens", "Did you mean"),
        ({"max_output_tokens": 0}, None, "at least 1"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "needs a schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [WEATHER], "tool_choice": "required"}, "text",
         "cannot go together"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]",
         "only text is served"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "items here are message"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id",
         "no function_call before it"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be one of user"),
        ({"input": []}, None, "messages"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(client, more, param, message):
    import openai

    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(**{"model": "scripted", "input": "<hi>", **more})
    assert param is None or caught.value.param == param


def test_refusal_of_a_stream_is_an_answer_of_its_own(client):
    import openai

    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.responses.create(model="other", input="<hi>", stream=True)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(client, temperature=-1.0, stream=True)


@pytest.mark.parametrize("tool", ['{"type": "function", "name": "f", "description": "\\ud800"}',
                                  '{"type": "function", "name": "f", "parameters": {"minimum": NaN}}'])  # fmt: skip
def test_what_the_answer_could_not_repeat_is_refused(client, tool):
    import httpx

    body = f'{{"input": "<hi>", "tool_choice": "none", "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{client.base_url}responses", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text
