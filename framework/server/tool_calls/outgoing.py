"""Events on their way out: neighbours of one kind as one, and no space around calls. Called by what finds calls."""

from __future__ import annotations

from framework.server.tool_calls.events import ArgumentsDelta, CallStarted, Event, TextDelta


class Outgoing:
    """Space before a call is layout, and so is what of it stands between a call and the next or the end."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._space = ""  # at the end of the text so far
        self._is_behind_call = False
        self._num_calls = 0

    def say(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._put_text(body)

    def begin(self, name: str) -> None:
        self._events.append(CallStarted(self._num_calls, name))
        self._num_calls += 1
        self._space, self._is_behind_call = "", True

    def give(self, arguments: str) -> None:
        """More arguments of the call that began last."""
        if not arguments:
            return
        index, last = self._num_calls - 1, self._events[-1] if self._events else None
        if isinstance(last, ArgumentsDelta):
            self._events[-1] = ArgumentsDelta(index, last.text + arguments)
        else:
            self._events.append(ArgumentsDelta(index, arguments))

    def taken(self) -> list[Event]:
        """What has come since this was asked last."""
        events, self._events = self._events, []
        return events

    def ended(self) -> list[Event]:
        """The last events."""
        if self._space and not self._is_behind_call:
            self._put_text(self._space)
        self._space = ""
        return self.taken()

    def _put_text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + text)
        else:
            self._events.append(TextDelta(text))
        self._is_behind_call = False


def held_back(text: str, marker: str | None) -> str:
    """The end of `text` that `marker` may begin with."""
    marker = marker or ""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((text[-size:] for size in sizes if marker.startswith(text[-size:])), "")
