"""Tools in `/v1/chat/completions`, as OpenAI's own client asks for them and reads their calls."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`"),
    pytest.mark.skipif(find_spec("openai") is None, reason="openai comes with the extra `clients`"),
]
# No word of tools: they are described in a system message of ours.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ messages[-1].content }}"
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SCRIPTS = {
    "<hi>": ["Hello", " there."],
    "<one>": ["So:\n", "<tool_call>\n", '{"name": "weather", ', '"arguments": {"ci', 'ty": "Rome"}}', "\n</tool_call>"],
    "<two>": [f"<tool_call>{CALL}</tool_call>", f"\n<tool_call>{CALL}</tool_call>"],
    "<bad>": ["<tool_call>weather in Rome</tool_call>"],
    "<cut>": ['<tool_call>{"name": "weather", "arguments": {"city": "', *(f"la{'.' * i} " for i in range(40))],
    "<think>": ["Rome", " or not", "</think>"],
    "dry\n</tool_response>": ["It is dry."],
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from .scripted import save_scripted

    return save_scripted(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, TEMPLATE)


@pytest.fixture(scope="module")
def client(folder):
    import openai

    from .here import serving

    with (
        serving(folder, "sampler.temperature=0") as here,
        openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, given, **more):
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return client.chat.completions.create(model="small", messages=messages, **{"tools": [TOOL], **more})


def streamed(client, given, **more):
    """(text, {index: [name, arguments]}, finish_reason)"""
    text, calls, reason = "", {}, None
    for chunk in ask(client, given, stream=True, **more):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return text, calls, reason


def test_call_is_parsed_and_ends_the_answer(client):
    [choice] = ask(client, "<one>").choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "So:"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert call.id.startswith("call_")


@pytest.mark.parametrize("given", ["<hi>", "<one>", "<two>", "<bad>"])
def test_stream_gives_what_the_whole_answer_holds(client, given):
    [choice] = ask(client, given).choices
    calls = {i: [c.function.name, c.function.arguments] for i, c in enumerate(choice.message.tool_calls or ())}
    assert streamed(client, given) == (choice.message.content or "", calls, choice.finish_reason)


def test_what_is_no_call_is_text(client):
    [choice] = ask(client, "<bad>").choices
    assert choice.message.content == "<tool_call>weather in Rome</tool_call>" and choice.finish_reason == "stop"


def test_arguments_that_max_tokens_cuts_off_are_given_and_the_reason_is_length(client):
    text, calls, reason = streamed(client, "<cut>", max_tokens=3)
    assert (text, reason) == ("", "length") and calls == {0: ["weather", '{"city": "la la. ']}


def test_result_of_a_call_is_a_message_of_the_tool(client):
    first = ask(client, "<one>").choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "dry"}
    messages = [{"role": "user", "content": "<one>"}, first.model_dump(exclude_none=True), result]
    assert ask(client, messages).choices[0].message.content == "It is dry."


def test_without_parallel_calls_one_is_given(client):
    assert len(ask(client, "<two>").choices[0].message.tool_calls) == 2
    assert len(ask(client, "<two>", parallel_tool_calls=False).choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_call_that_is_asked_for_comes_and_is_valid(client, choice):
    [answer] = ask(client, "<hi>", tool_choice=choice, parallel_tool_calls=False).choices
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    _, calls, reason = streamed(client, "<hi>", tool_choice=choice, parallel_tool_calls=False)
    assert calls == {0: ["weather", call.function.arguments]} and reason == "tool_calls"


def test_call_that_is_asked_for_may_stand_behind_the_reasoning(folder):
    import openai

    from .here import serving

    with (
        serving(folder, "sampler.temperature=0", "grammar.reasoning_end='</think>'") as here,
        openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client,
    ):
        [answer] = ask(client, "<think>", tool_choice="required", parallel_tool_calls=False).choices
    assert answer.message.content == "Rome or not</think>" and answer.message.tool_calls[0].function.name == "weather"


def test_strict_tool_holds_to_its_schema_without_being_asked_for(client):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    strict["function"]["parameters"] = {**TOOL["function"]["parameters"], "properties": {"city": {"enum": ["Oslo"]}}}
    [answer] = ask(client, "<one>", tools=[strict], max_tokens=200).choices
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert ask(client, "<hi>", tools=[strict]).choices[0].message.content == "Hello there."


def test_choice_of_none_leaves_text_text(client):
    [choice] = ask(client, "<one>", tool_choice="none").choices
    assert "<tool_call>" in choice.message.content and choice.message.tool_calls is None
