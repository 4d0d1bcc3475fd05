"""Errors a user can cause, one class a cause. No import of anything else here; everybody raises these.

Every message names the field, the value and the way out. What only our own bug can break is an `assert`
with the numbers on both sides, never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class FrameworkError(Exception):
    """Base of every error that a user can cause: the command line prints it as one line and exits with 2.

    The message is one line whatever stands in it: a name with a line break, a library's error of several lines.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(in_one_line(message))


class ConfigError(FrameworkError, ValueError):
    """A configuration key, value or combination that cannot be used."""


class PluginError(FrameworkError):
    """A component that was asked for by name and cannot be had: unknown, broken, unusable here, or incompatible."""


class StageError(PluginError):
    """A sampler stage that raised. Requests that use it end with the message as their error, the others go on.

    stage       its key in `sampler.stages`
    request_id  the only request that it concerns, None for all that use the stage
    """

    def __init__(self, message: str, stage: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.stage, self.request_id = stage, request_id

    def __reduce__(self) -> tuple[type[StageError], tuple[str, str, str | None]]:
        return type(self), (str(self), self.stage, self.request_id)


class KVMemoryError(PluginError):
    """A KV connector that has broken and could not be closed, with blocks in its hands: it may still write into them,
    whoever gets them next. The engine stops."""


class CheckpointError(FrameworkError, ValueError):
    """A model folder or file that is missing, damaged, or not what its own header says."""


class RequestError(FrameworkError, ValueError):
    """A prompt or a parameter that is refused at admission; nothing of the request has run."""


class NotBuiltError(FrameworkError, ValueError):
    """A promised feature whose part is not built yet: refused by name instead of accepted and ignored."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known word, or an empty string when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def code_is_never_run(config: Mapping[str, object]) -> str:
    """A sentence for whoever has no model of an architecture, where config.json names code for it; else nothing."""
    code = config.get("auto_map")
    if not code:
        return ""
    return f" Code that comes with a checkpoint (auto_map={shown(code)}) is never run; write a plugin of it."


def in_one_line(text: str) -> str:
    """`text` without the breaks between its lines; other signs that are not to be seen become escapes."""
    line = " ".join(part for part in map(str.strip, text.splitlines()) if part)
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def shown(value: object) -> str:
    """`value` as a message shows it: its repr in one line, the middle left out where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number with more digits than Python writes, or somebody's __repr__
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-40:]}"


def as_typed(value: object) -> str:
    """A value as it is typed into a configuration: a text bare where it is short and can be seen, all else `shown`."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 160 else shown(value)


def first_line(error: BaseException) -> str:
    """What a library's error says first; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def class_and_text(error: BaseException) -> str:
    """`ValueError: what it says`, in one line."""
    return in_one_line(f"{type(error).__name__}: {error}")


def no_such_choice(key: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The refusal of a value that is none of `choices`, with the nearest one."""
    known = list(choices)
    near = did_you_mean(str(value), known)
    return ConfigError(f"{key}={as_typed(value)}: there is no such choice.{near} Choices: {', '.join(known)}")
