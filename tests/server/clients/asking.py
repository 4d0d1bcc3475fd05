"""Questions and schemas that the tests of this folder share, and whether a client is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

FRANCE = [{"role": "user", "content": "Name the capital of France."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    """Short, so that a small model ends it."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_large: bool


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def is_weather(arguments: str | dict[str, Any]) -> bool:
    """Whether these are arguments of TOOL."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return set(given) == {"city"} and isinstance(given["city"], str) and len(given["city"]) <= 12


def installed(package: str) -> pytest.MarkDecorator:
    """Skips without a client, by its name."""
    reason = f"{package} is not installed; it comes with the extra `clients`"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)
