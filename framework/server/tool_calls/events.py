"""What a stream of a model's text gives when it is read for calls of tools. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call, whose arguments follow. index: 0 for the first of a text."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON of a call's arguments. All of one call come before the next call starts."""

    index: int
    text: str


Event = TextDelta | CallStarted | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON as the model wrote it, cut off or wrong where the model's text is."""

    name: str
    arguments: str
