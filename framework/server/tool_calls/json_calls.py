"""Calls in JSON found in a text as it comes: between tags, behind a marker, or as the whole text.

One machine for the formats that `Layout` describes. What might still become a call is held back until it is known;
what turns out to be none is text, as it stood. Called through `tool_format`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from framework.server.tool_calls.call_reader import NAME, CallReader
from framework.server.tool_calls.events import Event
from framework.server.tool_calls.outgoing import Outgoing, held_back

_NAMED = re.compile(rf"({NAME})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_MAYBE_NAMED = re.compile(r"[\w.:/-]{0,256}(?:\[[A-Z_]{0,9}(?:\][\w-]{0,64})?){0,2}\s*")


@dataclass(frozen=True)
class Layout:
    """What stands around calls.

    begin       text behind which a call comes; None: there is none
    end         text behind it; None: nothing ends one but its own last brace
    at_start    a text that begins with a call needs no `begin`
    lists       calls may stand in a list
    separator   stands between two calls that are in no list
    named       a call may be its name and the object of its arguments, with [ARGS] between them
    says_begin  `begin` is part of what is said
    """

    begin: str | None = None
    end: str | None = None
    at_start: bool = False
    lists: bool = False
    separator: str | None = None
    named: bool = False
    says_begin: bool = False


class JsonCalls:
    """`ToolStream` of a layout.

    A call that breaks off before its arguments begin is text. One whose arguments break keeps them as they were
    written, up to `end`: they have been given to the client by then.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._out = Outgoing()
        self._rest = ""  # taken and not yet read
        self._held = ""  # read, and text unless a call follows
        self._in_list = False
        self._is_marked = False  # by a `begin`
        self._reader = CallReader()
        self._phase: Callable[[], bool] = self._start if layout.at_start else self._text

    def feed(self, delta: str) -> list[Event]:
        self._rest += delta
        while self._rest and self._phase():
            pass
        return self._out.taken()

    def finish(self) -> list[Event]:
        if self._phase == self._broken:
            self._out.give(self._rest)
        elif self._phase != self._after or self._rest:  # what is held behind a call separates it from nothing
            unknown = self._reader.held if self._phase == self._call and self._reader.name is None else ""
            self._out.say(self._held + unknown + self._rest)
        return self._out.ended()

    # ---------------------------------------------- phases: each reads from `_rest`, and is False when it needs more

    def _start(self) -> bool:
        """Nothing but space has come."""
        body = self._rest.lstrip()
        self._out.say(self._rest[: len(self._rest) - len(body)])
        self._rest, begin = body, self._layout.begin
        if not body or (begin and len(body) < len(begin) and begin.startswith(body)):
            return False
        is_call = body[0] == "{" or (body[0] == "[" and self._layout.lists)
        self._phase = self._open if is_call and not (begin and body.startswith(begin)) else self._text
        return True

    def _text(self) -> bool:
        begin = self._layout.begin
        before, found, behind = self._rest.partition(begin) if begin else (self._rest, "", "")
        kept = "" if found else held_back(before, begin)
        says_begin = self._layout.says_begin
        self._out.say(before[: len(before) - len(kept)] + (found if says_begin else ""))
        self._rest, self._held, self._in_list = behind or kept, "" if says_begin else found, False
        if found:
            self._is_marked, self._phase = True, self._open
        return bool(found)

    def _open(self) -> bool:
        """A call has to begin here."""
        self._hold_space()
        if self._rest.startswith("{"):
            self._reader = CallReader(needs_arguments=not self._is_marked)
            self._phase = self._call
        elif self._rest.startswith("[") and self._layout.lists and not self._in_list:
            self._in_list = True
            self._hold(1)
        elif self._rest and self._layout.named and not self._in_list:
            self._phase = self._name
        elif self._rest:
            self._no_call()
        return bool(self._rest)

    def _name(self) -> bool:
        """The name of a call whose arguments follow."""
        name, brace, _ = self._rest.partition("{")
        head = _NAMED.fullmatch(name)
        if brace and head:
            self._hold(len(name))
            self._begin(head[1])
            self._reader, self._phase = CallReader(head[1]), self._call
        elif brace or not _MAYBE_NAMED.fullmatch(name):
            self._no_call()
        else:
            return False
        return True

    def _call(self) -> bool:
        reader, given = self._reader, []
        for place, c in enumerate(self._rest):
            was_unknown = reader.name is None
            given.append(reader.take(c))
            if was_unknown and reader.name is not None:
                self._begin(reader.name)
            if reader.is_broken or reader.is_whole:
                self._out.give("".join(given))
                self._rest = self._rest[place + reader.is_whole :]
                self._leave_call()
                return True
        self._out.give("".join(given))
        self._rest = ""
        return False

    def _leave_call(self) -> None:
        if self._reader.name is None:
            self._no_call(self._reader.held)
        else:
            self._phase = self._broken if self._reader.is_in_arguments else self._after

    def _broken(self) -> bool:
        """In arguments that are no JSON."""
        end = self._layout.end
        before, found, behind = self._rest.partition(end) if end else (self._rest, "", "")
        kept = "" if found else held_back(before, end)
        self._out.give(before[: len(before) - len(kept)])
        self._rest = found + behind or kept
        if found:
            self._phase = self._after
        return bool(found)

    def _after(self) -> bool:
        """Behind a call."""
        self._hold_space()
        rest, end, separator = self._rest, self._layout.end, "," if self._in_list else self._layout.separator
        if not rest or (end and len(rest) < len(end) and end.startswith(rest)):
            return False
        if end and rest.startswith(end):
            self._held, self._rest, self._phase = "", rest[len(end) :], self._text
        elif separator and rest[0] == separator and separator not in self._held:
            self._hold(1)
        elif rest[0] == "]" and self._in_list:
            self._in_list, self._rest = False, rest[1:]
        elif rest[0] == "{":
            self._phase = self._open
        else:
            self._no_call()
        return True

    # ------------------------------------------------------------------------------------------------------- moves

    def _hold_space(self) -> None:
        self._hold(len(self._rest) - len(self._rest.lstrip()))

    def _hold(self, count: int) -> None:
        self._held += self._rest[:count]
        self._rest = self._rest[count:]

    def _begin(self, name: str) -> None:
        self._held = ""
        self._out.begin(name)

    def _no_call(self, read: str = "") -> None:
        """What is held and `read` is text, and a call may begin behind its own `begin`, which was none."""
        begin, text = self._layout.begin, self._held + read + self._rest
        marked = len(begin) if begin and self._held.startswith(begin) else 0
        self._out.say(text[:marked])
        self._held, self._rest, self._phase = "", text[marked:], self._text
