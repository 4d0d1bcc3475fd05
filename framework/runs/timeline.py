"""`run=timeline trace=FILE output=FILE.html`: a trace as one page, which needs nothing else to be looked at.

Gathers what the page shows of each request and each step; the page, `timeline.html`, draws it. No engine is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.engine.recording import read_lines
from framework.engine.siblings import SIBLING_MARK
from framework.errors import ConfigError, class_and_text
from framework.runs.output_file import refuse_same_file
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs

PREFILL, DECODE, AGAIN = range(3)
"""Kinds of spans: tokens of a prompt, one token behind the known ones, and what a preempted request computes again."""
PARTS = ("schedule", "rows", "prepare", "plan", "forward", "sample", "wait", "post", "update")
"""Parts of a step, in the order in which they come."""
_FACTS = ("model", "backend", "attention", "dtype", "max_model_len", "block_size", "num_blocks", "async_scheduling")
_DATA = "/*DATA*/null"


def run(config: Config, args: RunArgs) -> dict[str, float]:
    """Writes the page; returns the numbers of its steps and requests."""
    refuse_unread("timeline", args, OF_BENCH)
    refuse_texts("timeline", args, dict.fromkeys(("prompt", "system", "prompts_file", "target"), "leave it out"))
    if config.trace is None:
        raise ConfigError("run=timeline needs a trace to draw. Name one: trace=FILE")
    if args.output is None or not args.output.endswith(".html"):
        given = "" if args.output is None else f", not output={args.output}"
        raise ConfigError(f"run=timeline writes a page. Name it: output=FILE.html{given}")
    refuse_same_file({"trace": config.trace, "output": args.output})
    shown = timeline(config.trace)
    try:
        Path(args.output).write_text(page(shown, Path(config.trace).name), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"output={args.output}: {reason}. Name a file in a folder that can be written") from None
    print(f"{args.output}: {len(shown['steps'])} steps of {len(shown['lanes'])} requests", flush=True)
    return {"steps": float(len(shown["steps"])), "requests": float(len(shown["lanes"]))}


def page(shown: Mapping[str, Any], name: str) -> str:
    """The page with what it shows in it. name: its heading."""
    template = files("framework.runs").joinpath("timeline.html").read_text(encoding="utf-8")
    text = json.dumps({**shown, "name": name}, separators=(",", ":")).replace("<", "\\u003c")  # ends no script
    assert template.count(_DATA) == 1, "the page has one place for its data"
    return template.replace(_DATA, text)


def timeline(path: str) -> dict[str, Any]:
    """What the page shows of a file: facts, parts of a step, columns of the steps, and a lane a request. Raises
    ConfigError, which names the line, for what is no trace."""
    lines = read_lines(path)
    facts = {key: lines[0].values[key] for key in _FACTS if key in lines[0].values}
    drawn = _Timeline()
    for line in lines[1:]:
        try:
            getattr(drawn, f"add_{line.kind}")(line.values)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"line {line.number} cannot be read: {class_and_text(error)}"
            raise ConfigError(f"trace={path}: {what}. Name the file of a trace") from None
    return {"facts": facts, "parts": list(PARTS), "steps": drawn.steps, "lanes": drawn.lanes}


class _Timeline:
    """Lanes in the order of arrival, a completion each, and steps: lists whose columns `timeline.html` names.

    A lane's spans are [number of the step, kind, tokens, tokens computed before], its marks [seconds, what].
    """

    def __init__(self) -> None:
        self.lanes: list[dict[str, Any]] = []
        self.steps: list[list[Any]] = []
        self._current: dict[str, dict[str, Any]] = {}  # the last one of each id
        self._again: set[str] = set()
        self._end = 0.0

    def add_request(self, values: Mapping[str, Any]) -> None:
        params = values.get("params") or {}
        for index in range(params.get("n", 1)):
            name = f"{values['request']}{SIBLING_MARK}{index}" if index else values["request"]
            lane = {
                "id": name.replace(SIBLING_MARK, "/"), "t": values["t"], "prompt": values["num_prompt_tokens"],
                "most": values.get("max_total_tokens"), "hits": 0, "output": 0, "spans": [], "marks": [], "end": None,
            }  # fmt: skip
            self.lanes.append(lane)
            self._current[name] = lane

    def add_step(self, values: Mapping[str, Any]) -> None:
        number, seconds = len(self.steps), values["seconds"]
        end = values["t"]
        begin = max(self._end, end - sum(seconds.values()))
        self._end = max(self._end, end)
        self._come_and_go(values, begin)
        prompt_tokens = sum(self._add_span(number, row) for row in values["rows"])
        for name, tokens in values["tokens"].items():
            self._current[name]["output"] += len(tokens)
        for name, reason in values["finished"].items():
            self._finish(name, end, reason)
        counts, num_tokens = values["counts"], sum(row[2] for row in values["rows"])
        used = counts.get("num_blocks", 1) - 1 - counts.get("num_free_blocks", 0)
        parts = [seconds.get(part, 0.0) for part in PARTS]
        self.steps.append(
            [values["step"], begin, end, prompt_tokens, num_tokens - prompt_tokens, len(values["rows"]),
             counts.get("num_waiting", 0), used, len(values["preempted"]), parts]
        )  # fmt: skip

    def add_end(self, values: Mapping[str, Any]) -> None:
        self._finish(values["end"], values["t"], values["finish_reason"])

    def _come_and_go(self, values: Mapping[str, Any], begin: float) -> None:
        for name in values["preempted"]:
            self._current[name]["marks"].append([begin, "preempted"])
        for admitted in values["admitted"]:
            name, lane = admitted["id"], self._current[admitted["id"]]
            if lane["spans"]:
                self._again.add(name)
            else:
                lane["hits"] = admitted["hit_tokens"]
            lane["marks"].append([begin, "admitted"])

    def _add_span(self, number: int, row: Sequence[Any]) -> int:
        """How many of the row's tokens stand in a prompt and are computed for the first time."""
        name, computed, count, _, draws = row
        lane = self._current[name]
        prompt = max(0, min(lane["prompt"], computed + count) - computed)
        kind = AGAIN if name in self._again else PREFILL if prompt else DECODE
        if draws:
            self._again.discard(name)
        lane["spans"].append([number, kind, count, computed])
        return int(prompt)

    def _finish(self, name: str, t: float, reason: str) -> None:
        if name in self._current:
            self._current[name]["end"] = [t, reason]
