"""`langchain-openai`: a ChatOpenAI whose base is the server."""

from __future__ import annotations

import pytest

from .asking import ANSWER, FRANCE, WEATHER, City, Weather, installed, is_weather

pytestmark = installed("langchain_openai")


@pytest.fixture(scope="module")
def chat(served):
    from langchain_openai import ChatOpenAI

    def chat(max_tokens=16):
        return ChatOpenAI(
            model=served.model, base_url=f"{served.url}/v1", api_key="unused", temperature=0, max_tokens=max_tokens,
            max_retries=0,
        )  # fmt: skip

    return chat


def test_invoke_answers(chat):
    answer = chat().invoke(FRANCE[0]["content"])
    assert answer.content == ANSWER and answer.usage_metadata["output_tokens"] > 0


def test_stream_gives_the_same_text(chat):
    assert "".join(chunk.content for chunk in chat().stream(FRANCE[0]["content"])) == ANSWER


def test_bound_tool_is_called(chat):
    answer = chat(80).bind_tools([Weather], tool_choice="Weather").invoke(WEATHER[0]["content"])
    assert [call["name"] for call in answer.tool_calls] == ["Weather"] and is_weather(answer.tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_the_object(chat, method):
    answer = chat(80).with_structured_output(City, method=method).invoke(FRANCE[0]["content"])
    assert isinstance(answer, City)
