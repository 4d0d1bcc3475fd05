"""The `/` commands of `run=chat`: what each does, and the page that lists them. Their words go to stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from framework.errors import did_you_mean

if TYPE_CHECKING:
    from framework.runs.conversation import Conversation

HELP = {
    "/help": "this page",
    "/reset": "forget the conversation; system message and parameters stay",
    "/retry": "answer the last message again",
    "/system [TEXT]": "show the system message, set it, or remove it with /system off",
    "/params [NAME=VALUE ...]": "show the parameters, change some, or go back with /params reset",
    "/save FILE": "write the conversation, for /load and for prompts_file=FILE",
    "/load FILE": "go on with a saved conversation",
    "/exit": "leave, as Ctrl-D does",
}
MANNERS = """\
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines; //TEXT says /TEXT.
Ctrl-C stops an answer and keeps what was said; a second one leaves."""


class Commands:
    """answer: makes the chat answer the last message."""

    def __init__(self, conversation: Conversation, answer: Callable[[], None]) -> None:
        self._conversation, self._answer = conversation, answer
        self._was_obeyed = True
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/reset": self._reset, "/retry": self._retry, "/system": self._system,
            "/params": self._params, "/save": self._save, "/load": self._load,
        }  # fmt: skip

    def obey(self, line: str) -> tuple[bool, bool]:
        """Does what the line says: (whether the chat goes on, whether the command could be obeyed)."""
        name, _, rest = line.strip().partition(" ")
        self._was_obeyed = True
        if name in ("/exit", "/quit", "/bye"):
            if not rest.strip():
                return False, True
            self._refuse(f"{name} takes nothing more. Write {name} alone, or /{line.strip()} to say it")
            return True, False
        action = self._actions.get(name)
        if action is None:
            known = [*self._actions, "/exit"]
            near = did_you_mean(name, known)
            self._refuse(
                f"{name}: there is no such command.{near} Write /{name} to say it. Commands: {', '.join(known)}"
            )
        else:
            action(rest.strip())
        return True, self._was_obeyed

    def _refuse(self, text: str) -> None:
        self._was_obeyed = False
        _tell(f"error: {text}")

    def _help(self, rest: str) -> None:
        width = max(map(len, HELP))
        _tell("\n".join(f"  {usage:<{width}}  {meaning}" for usage, meaning in HELP.items()))
        _tell(MANNERS)

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        _tell("(the conversation begins anew)")

    def _retry(self, rest: str) -> None:
        if self._conversation.without_last_answer():
            self._answer()
        else:
            self._refuse("/retry: there is no answer yet")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "off" else rest
        _tell(f"system: {self._conversation.system or 'none of yours; the chat template may have one'}")

    def _params(self, rest: str) -> None:
        try:
            if rest == "reset":
                self._conversation.first_params()
            elif rest:
                self._conversation.change(_values(rest))
        except (ValueError, TypeError) as error:
            self._refuse(str(error))
            return
        shown = [f"{name}={_shown(name, value)}" for name, value in self._conversation.set_params().items()]
        _tell("params: " + (", ".join(shown) or "the defaults"))

    def _save(self, rest: str) -> None:
        if self._with_file("/save", rest, self._conversation.save):
            _tell(f"(saved to {rest})")

    def _load(self, rest: str) -> None:
        if self._with_file("/load", rest, self._conversation.load):
            _tell(f"({len(self._conversation.messages)} messages of {rest})")

    def _with_file(self, name: str, path: str, action: Callable[[Path], None]) -> bool:
        if not path:
            self._refuse(f"{name}: name a file, as in {name} talk.jsonl")
            return False
        try:
            action(Path(path).expanduser())
        except (OSError, ValueError) as error:
            self._refuse(f"{name} {path}: {getattr(error, 'strerror', None) or error}")
            return False
        return True


def _values(text: str) -> dict[str, Any]:
    """{name: value} of words NAME=VALUE, values read as YAML. ValueError for a word of another form."""
    values = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if equals and name and not value:
            raise ValueError(f"{word}: a value is missing. Write {name}=VALUE, or {name}=null for none")
        if not equals or not name:
            raise ValueError(f"{word}: write NAME=VALUE, as in /params temperature=0.7 max_tokens=200")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            values[name] = value
    return values


def _shown(name: str, value: Any) -> str:
    return "null (as many as fit)" if name == "max_tokens" and value is None else repr(value)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
