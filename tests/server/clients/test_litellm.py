"""`litellm`, which reaches the server as an OpenAI model with a base of its own."""

from __future__ import annotations

import pytest

from .asking import ANSWER, FRANCE, TOOL, WEATHER, installed, is_weather

pytestmark = installed("litellm")


@pytest.fixture(scope="module")
def complete(served):
    import litellm

    def complete(messages=FRANCE, **more):
        given = {"temperature": 0, "max_tokens": 16, "num_retries": 0, **more}
        where = {"model": f"openai/{served.model}", "api_base": f"{served.url}/v1", "api_key": "unused"}
        return litellm.completion(messages=messages, **where, **given)

    return complete


def test_completion_answers(complete):
    answer = complete()
    assert answer.choices[0].message.content == ANSWER and answer.usage.completion_tokens > 0


def test_stream_gives_the_same_text(complete):
    assert "".join(chunk.choices[0].delta.content or "" for chunk in complete(stream=True)) == ANSWER


def test_tool_is_called(complete):
    answer = complete(WEATHER, tools=[TOOL], tool_choice="required", max_tokens=80)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and is_weather(call.function.arguments)


def test_bad_request_is_its_bad_request_error(complete):
    import litellm

    with pytest.raises(litellm.BadRequestError, match="top_p"):
        complete(top_p=7)
