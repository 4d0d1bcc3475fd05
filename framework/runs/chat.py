"""`run=chat`: a conversation at a terminal or through a pipe, streamed to stdout as it is made.

Ctrl-C stops an answer and keeps what was said; a second one, Ctrl-D or /exit leaves. The commands are in
`chat_commands`, the reading of messages in `chat_input`.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from framework.config import build_options
from framework.errors import FrameworkError
from framework.request import OutputKind, RequestOutput
from framework.runs import Incomplete
from framework.runs.chat_commands import Commands
from framework.runs.chat_input import ChatInput
from framework.runs.conversation import Conversation
from framework.runs.loading import announce
from framework.runs.options import ChatOptions
from framework.runs.signals import Stop, held_signals, raised_signals
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.runs import RunArgs

HINT = "/help lists the commands. Ctrl-C stops an answer; a second one, or Ctrl-D, leaves."
HALF = "\ufffd"  # what bytes that are no whole character decode to
LEAVE_HINT = "(Ctrl-C again, Ctrl-D or /exit leaves)"


def run(config: Config, args: RunArgs) -> None:
    """Talks until the input ends. `prompt=` is said first, `system=` is the system message."""
    _refuse(args)
    options = build_options(ChatOptions, args.options, "run")
    announce(config)
    from framework.engine.llm import LLM

    with LLM(config=config) as llm:
        conversation = Conversation(llm.engine, options.template, args.system)
        conversation.check()
        with raised_signals():
            Chat(llm.engine, conversation, ChatInput()).run(args.prompt)


def _refuse(args: RunArgs) -> None:
    instead = {
        "prompts_file": "use run=generate, whose lines may hold messages",
        "output": "the command /save writes the conversation",
        "target": "leave it out",
    }
    refuse_texts("chat", args, instead)
    refuse_unread("chat", args, OF_BENCH)


class Chat:
    """Reads messages, prints answers, obeys commands."""

    def __init__(self, engine: Engine, conversation: Conversation, source: ChatInput) -> None:
        self._engine, self._conversation, self._source = engine, conversation, source
        self._commands = Commands(conversation, self.answer)
        self._count = self._num_failed = 0
        self._was_interrupted = False

    def run(self, first: str | None = None) -> None:
        """Until the input ends. Incomplete when lines of a pipe could not be answered or obeyed."""
        self._talk(first)
        if self._num_failed and not self._source.is_terminal:
            raise Incomplete(f"{self._num_failed} of the messages and commands failed; they are named above")

    def _talk(self, first: str | None) -> None:
        if self._source.is_terminal:
            note(HINT)
        if first is not None:
            self.say(first)
        while (message := self._next()) is not None:
            if not message.strip():
                continue
            self._was_interrupted = False
            if message.startswith("/") and not message.startswith("//"):
                goes_on, was_obeyed = self._commands.obey(message)
                self._num_failed += not was_obeyed
                if not goes_on:
                    return
            else:
                self.say(message[1:] if message.startswith("//") else message)

    def _next(self) -> str | None:
        """The next message. A Ctrl-C at the prompt drops the line; the second in a row goes through."""
        while True:
            try:
                return self._source.read()
            except KeyboardInterrupt as interrupt:
                if interrupt.args or self._was_interrupted:  # SIGTERM, or the second
                    raise
                self._was_interrupted = True
                note(f"\n{LEAVE_HINT}")

    def say(self, text: str) -> None:
        """Adds the user's message and answers it; a message that is refused leaves the conversation as it was."""
        if (byte := _no_utf8(text)) is not None:
            self._fail(f"the message is not UTF-8: byte 0x{byte:02x}; send it as UTF-8")
            return
        self._conversation.add("user", text)
        self.answer()

    def answer(self) -> None:
        """Streams the answer to the last message of the conversation."""
        self._count += 1
        request_id = f"chat-{self._count}"
        params = self._conversation.params.replace(output_kind=OutputKind.DELTA)
        try:
            self._engine.add_request(request_id, self._conversation.prompt(), params)
        except (FrameworkError, ValueError, TypeError) as error:
            self._conversation.take_back()
            self._fail(f"{error}" + ("; /reset forgets the conversation" if self._conversation.messages else ""))
            return
        with held_signals() as stop:
            text, last = self._stream(request_id, stop)
        self._close(text, last)
        if stop.number is not None:
            self._stopped(stop)

    def _stream(self, request_id: str, stop: Stop) -> tuple[str, RequestOutput | None]:
        """(text, last output): prints pieces as they come, until the end or a signal."""
        pieces: list[str] = []
        last: RequestOutput | None = None
        while last is None or not last.finished:
            outputs = self._engine.step() if stop.number is None else self._engine.end(request_id)
            for output in outputs:
                last = output
                pieces.append(_whole_characters(output))
                sys.stdout.write(pieces[-1])
            sys.stdout.flush()
            if stop.number is not None and not outputs:
                break
        return "".join(pieces), last

    def _close(self, text: str, last: RequestOutput | None) -> None:
        if not text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        if text:
            self._conversation.add("assistant", text)
        else:
            self._conversation.take_back()
        completion = last.outputs[0] if last is not None else None
        if last is not None and last.error is not None:
            self._fail(last.error)
        elif completion is not None and completion.finish_reason == "length":
            note(f"(the answer ends at its limit: {self._conversation.limit()})")

    def _fail(self, text: str) -> None:
        self._num_failed += 1
        note(f"error: {text}")

    def _stopped(self, stop: Stop) -> None:
        if stop.number != signal.SIGINT or not self._source.is_terminal:
            stop.end()
        self._was_interrupted = True
        note(f"(stopped) {LEAVE_HINT}")


def _no_utf8(text: str) -> int | None:
    """The first byte of `text` that stdin could not decode (`chat_input` keeps it as a surrogate), None without one."""
    return next((ord(char) - 0xDC00 for char in text if 0xDC80 <= ord(char) <= 0xDCFF), None)


def _whole_characters(output: RequestOutput) -> str:
    """The piece of an output; a character that was cut off in the middle is left out."""
    completion = output.outputs[0]
    return completion.text.rstrip(HALF) if completion.finish_reason in ("abort", "length") else completion.text


def note(text: Any) -> None:
    """A line that is no part of the conversation goes to stderr."""
    print(text, file=sys.stderr, flush=True)
