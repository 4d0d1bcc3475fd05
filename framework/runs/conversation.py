"""The messages of a chat, its system message and its parameters: what the next prompt is made of. Prints nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.engine.admission import Prompt, chat_prompt
from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.engine.engine import Engine


class Conversation:
    """Starts with the configured defaults; without a configured max_tokens an answer may fill the model's context."""

    def __init__(self, engine: Engine, template: Mapping[str, Any], system: str | None = None) -> None:
        self._engine, self._template = engine, template
        self.system, self.messages = system, list[dict[str, str]]()
        defaults = engine.admission.defaults
        self.params = defaults if "max_tokens" in defaults.named else defaults.replace(max_tokens=None)
        self._first_params = self.params
        self._saved: Path | None = None

    def check(self) -> None:
        """Raises what every message would raise: without a chat template, or with parameters that make no chat."""
        if self.params.n > 1:
            raise ConfigError(f"sampler.n={self.params.n}: a chat has one answer at a time. Use run=generate")
        if not self.params.detokenize:
            raise ConfigError("sampler.detokenize=false: a chat is made of text. Leave it out")
        self.add("user", "?")
        self.prompt()
        self.reset()

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Without the last message of the user, which got no answer."""
        self.messages.pop()

    def reset(self) -> None:
        """Forgets the messages; the system message and the parameters stay."""
        self.messages.clear()

    def without_last_answer(self) -> bool:
        """Drops the last answer, so that its question can be answered again. False when there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def all_messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system is not None else []), *self.messages]

    def prompt(self) -> Prompt:
        """Raises RequestError when the chat template refuses the messages."""
        return chat_prompt(self._engine.tokenizer, self.all_messages(), add_generation_prompt=True, **self._template)

    def limit(self) -> str:
        """What ended an answer that ended by its length."""
        if self.params.max_tokens is not None:
            return f"max_tokens={self.params.max_tokens}; /params max_tokens=NUMBER changes it"
        return f"engine.max_model_len={self._engine.admission.limits.max_model_len}; /reset begins anew"

    # ---------------------------------------------------------------------------------------------- parameters

    def change(self, values: Mapping[str, Any]) -> None:
        """Other parameters from the next answer on. ValueError or TypeError leave them as they were."""
        for name in ("n", "output_kind", "detokenize"):
            if name in values:
                raise ValueError(f"{name} is fixed in a chat; leave it out")
        changed = self.params.replace(**values)
        self._engine.admission.check(changed)
        self.params = changed

    def first_params(self) -> None:
        """Back to the parameters that the chat began with."""
        self.params = self._first_params

    def set_params(self) -> dict[str, Any]:
        """Parameters that are not the defaults of SamplingParams."""
        return {name: value for name, value in self.params.unlike_defaults().items() if name != "output_kind"}

    # --------------------------------------------------------------------------------------------------- files

    def save(self, path: Path) -> None:
        """Writes one JSON line that `prompts_file=` and `load` read. OSError, or FileExistsError for another's file."""
        if path.exists() and path != self._saved:
            raise FileExistsError(17, "there is a file of that name; name another")
        path.write_text(json.dumps({"messages": self.all_messages()}, ensure_ascii=False) + "\n", encoding="utf-8")
        self._saved = path

    def load(self, path: Path) -> None:
        """Goes on with a saved conversation. OSError, or ValueError for a file that holds none."""
        messages = _messages_of(json.loads(path.read_text(encoding="utf-8")))
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        self.messages = messages


def _messages_of(line: Any) -> list[dict[str, str]]:
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('it is not a saved conversation: one line {"messages": [...]}')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{message!r} is no message with a role and a content")
    return messages
