"""Reads the file of `trace=`: its lines, checked one by one, and a recording that can be executed again.

What is wrong with a file is a ConfigError with the number of its line. `engine.replaying` executes a recording, a
timeline draws the lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.config import Config
from framework.engine.siblings import SIBLING_MARK
from framework.engine.trace_format import TRACE_FORMAT, read_config, read_params
from framework.errors import ConfigError, class_and_text
from framework.request import SamplingParams
from framework.rng import child_seed

_KEYS: Mapping[str, tuple[str, ...]] = {
    "trace": ("time",),
    "request": ("t", "num_prompt_tokens"),
    "step": ("t", "rows", "admitted", "preempted", "aborted", "tokens", "finished", "counts", "seconds"),
    "end": ("t", "finish_reason"),
}
"""What a line of each kind holds in every format, beside what names its kind."""
_OF_REPLAY = ("left", "only_decodes", "goes_on", "prompt_tokens", "blocks")
_AGAIN = "Record it again with this version"


@dataclass(frozen=True)
class Line:
    """number: from 1. kind: trace, request, step or end."""

    number: int
    kind: str
    values: Mapping[str, Any]


@dataclass
class RecordedRequest:
    """A request, or a completion of one with n > 1.

    seed       with which it drew
    token_ids  what is known of it so far while it is executed again: the prompt at first
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: float
    eos_token_ids: frozenset[int]
    sample_index: int = 0
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)


@dataclass(frozen=True)
class Recording:
    """facts: of the first line. events: requests and the lines of steps, in the order of the file."""

    path: str
    facts: Mapping[str, Any]
    config: Config
    events: list[RecordedRequest | Line]

    @property
    def has_stages(self) -> bool:
        """Whether it was recorded with `engine.trace_stages`."""
        return self.config.engine.trace_stages


def read_lines(path: str) -> list[Line]:
    """All lines of a trace of any format. Raises ConfigError, which names the line."""
    try:
        found = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(
            f"trace={path}: {getattr(error, 'strerror', None) or error}. Name the file of a trace"
        ) from None
    if not found:
        raise ConfigError(f"trace={path}: line 1 is missing, the file is empty. Name the file of a trace")
    return list(_lines(path, found))


def _lines(path: str, found: bytes) -> Iterator[Line]:
    texts = found.split(b"\n")
    is_whole = texts.pop() == b""
    if not is_whole:
        number = found.count(b"\n") + 1
        raise _wrong(path, number, "is cut off. Delete it, and what is before it can be read")
    for number, text in enumerate(texts, start=1):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, number, f"is not JSON ({error}). Name the file of a trace") from None
        yield Line(number, _kind(path, number, values), values)


def _kind(path: str, number: int, values: Any) -> str:
    kind = next((kind for kind in _KEYS if isinstance(values, dict) and kind in values), None)
    if kind is None or (kind == "trace") != (number == 1):
        what = "is not the first line of a trace" if number == 1 else f"is none of {', '.join(list(_KEYS)[1:])}"
        raise _wrong(path, number, f"{what}. Name the file of a trace")
    if missing := [key for key in _KEYS[kind] if key not in values]:
        raise _wrong(path, number, f"lacks {', '.join(missing)}. Name the file of a trace")
    if kind == "trace" and values[kind] not in range(1, TRACE_FORMAT + 1):
        raise _wrong(path, number, f"says format {values[kind]!r}, and this version reads 1 to {TRACE_FORMAT}")
    return kind


def _wrong(path: str, number: int, what: str) -> ConfigError:
    return ConfigError(f"trace={path}: line {number} {what}")


def read_recording(path: str) -> Recording:
    """A trace that can be executed again. Raises ConfigError for one that cannot, naming what it lacks."""
    first, *lines = read_lines(path)
    if first.values["trace"] < TRACE_FORMAT:
        raise _wrong(path, 1, f"says format 1, which holds too little for a replay. {_AGAIN}")
    config = _config(path, first)
    events: list[RecordedRequest | Line] = []
    known = set[str]()
    for line in lines:
        if line.kind == "request":
            requests = list(_requests(path, line))
            known.update(one.request_id for one in requests)
            events += requests
        elif line.kind == "step":
            _check_step(path, line, known)
            events.append(line)
    return Recording(path, first.values, config, events)


def _config(path: str, first: Line) -> Config:
    if first.values.get("config") is None:
        raise _wrong(path, 1, "holds no configuration: an option of a plugin could not be written as JSON")
    try:
        return read_config(first.values["config"])
    except (ValueError, TypeError, KeyError) as error:
        raise _wrong(path, 1, f"holds a configuration that cannot be read: {class_and_text(error)}. {_AGAIN}") from None


def _requests(path: str, line: Line) -> Iterator[RecordedRequest]:
    """The request of a line, one a completion."""
    values = line.values
    if values.get("params") is None:
        raise _wrong(path, line.number, f"has parameters that JSON cannot hold: {values.get('unwritten')}")
    if "prompt_token_ids" not in values:
        raise _wrong(
            path, line.number, "has no prompt_token_ids: recorded with engine.trace_prompts=false. Set it to true"
        )
    try:
        params = read_params(values["params"], values["named"])
        seed, eos = int(values["seed"]), frozenset(values["eos_token_ids"])
        for index in range(params.n):
            own = params.replace(prompt_logprobs=None) if index and params.prompt_logprobs is not None else params
            name = f"{values['request']}{SIBLING_MARK}{index}" if index else values["request"]
            prompt, child = values["prompt_token_ids"], child_seed(seed, index) if index else seed
            yield RecordedRequest(name, prompt, own, child, values["arrival"], eos, index)
    except (ValueError, TypeError, KeyError) as error:
        raise _wrong(path, line.number, f"cannot be read: {class_and_text(error)}. {_AGAIN}") from None


def _check_step(path: str, line: Line, known: Set[str]) -> None:
    if missing := [key for key in _OF_REPLAY if key not in line.values]:
        raise _wrong(path, line.number, f"lacks {', '.join(missing)}. {_AGAIN}")
    try:
        rows = [request_id for request_id, _, _, _, _ in line.values["rows"]]
        admitted = [new["id"] for new in line.values["admitted"] if {"row", "hit_tokens", "known_tokens"} <= new.keys()]
        unknown = next((one for one in (*rows, *admitted) if one not in known), None)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _wrong(path, line.number, f"cannot be read: {class_and_text(error)}. {_AGAIN}") from None
    if unknown is not None:
        raise _wrong(path, line.number, f"names request {unknown!r}, of which no earlier line tells. {_AGAIN}")
