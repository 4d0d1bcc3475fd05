"""`run=replay trace=FILE`: the recorded schedule once more, and the first step, request and stage that differ.

Words of the command line change what is built: `sampler=greedy` asks what another sampler would have done. Reads the
trace, has the engine's part of it done in `framework.engine.replaying`, and reports.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from framework.config import build_options, compose
from framework.engine.differences import Difference, Unlike, unlike_configs
from framework.engine.recording import Line, Recording, read_recording
from framework.errors import ConfigError
from framework.runs import Incomplete
from framework.runs.loading import announce
from framework.runs.replay_config import changed_request, replay_config, typed_params, what_differs
from framework.runs.replay_options import ReplayOptions
from framework.runs.signals import held_signals
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.engine.replaying import Outcome
    from framework.runs import RunArgs

_FIGURES = ("steps", "requests", "tokens", "unlike", "unlike_tokens", "seconds")
_LISTED = 20
"""Requests that the report names one by one."""


@dataclass(frozen=True)
class ReplayReport:
    """What the run prints. config: what of the configuration differs, a sentence each."""

    trace: str
    compared: str
    seconds: float
    steps: int
    requests: int
    tokens: int
    unlike: int
    unlike_tokens: int
    first: Difference | None
    others: list[Difference]
    config: list[str]
    broken: str | None


def run(config: Config, args: RunArgs) -> dict[str, float]:
    """Replays and prints what was found; raises Incomplete, with the figures, where something differs."""
    options = build_options(ReplayOptions, args.options, "run")
    _refuse(config, args)
    recording = read_recording(str(config.trace))
    if options.compare == "stages" and not recording.has_stages:
        raise ConfigError(
            f"run.compare=stages: trace={recording.path} holds tokens alone. Record with engine.trace_stages=true"
        )
    made = replay_config(recording, config, args.typed, compose)
    report = _replay(recording, made, args, compare_stages=options.compare != "tokens")
    print(json.dumps(asdict(report), indent=1, ensure_ascii=False) if options.json else _text(report), flush=True)
    figures = {name: float(getattr(report, name)) for name in _FIGURES}
    if report.unlike:
        raise Incomplete(f"the replay differs from {recording.path}", figures)
    return figures


def _refuse(config: Config, args: RunArgs) -> None:
    refuse_unread("replay", args, {**OF_BENCH, "server": "leave it out"})
    texts = ("prompt", "system", "prompts_file", "target", "output")
    refuse_texts("replay", args, dict.fromkeys(texts, "what runs stands in the trace"))
    if config.trace is None:
        raise ConfigError("run=replay needs a trace to execute. Name one: trace=FILE")


def _replay(recording: Recording, config: Config, args: RunArgs, *, compare_stages: bool) -> ReplayReport:
    announce(config)
    from tqdm import tqdm

    from framework.engine.build import build_engine
    from framework.engine.replaying import Replay

    changed = changed_request(recording, config, args.typed)
    with ExitStack() as stack:
        engine = build_engine(config, keep_logits=True)
        stack.callback(engine.close)
        stop = stack.enter_context(held_signals())
        start = perf_counter()
        total, quiet = sum(isinstance(event, Line) for event in recording.events), not sys.stderr.isatty()
        bar = stack.enter_context(tqdm(total=total, unit="step", file=sys.stderr, leave=False, disable=quiet))
        replay = Replay(engine, recording, changed, compare_stages=compare_stages)

        def step(count: int) -> None:
            bar.update(count)
            stop.end()

        outcome = replay.run(step)
        seconds = perf_counter() - start
        first = _explained(engine, recording, config, outcome)
    return ReplayReport(
        trace=recording.path,
        compared="tokens and stages" if compare_stages and recording.has_stages else "tokens",
        seconds=round(seconds, 3),
        steps=outcome.num_steps,
        requests=outcome.num_requests,
        tokens=outcome.num_tokens,
        unlike=outcome.num_unlike,
        unlike_tokens=outcome.num_unlike_tokens,
        first=first,
        others=list(outcome.differences.values())[1:],
        config=[
            *_config_lines(recording.config, config),
            *_params_lines(config, args),
            *_version_lines(recording, engine),
        ],
        broken=outcome.broken,
    )


def _explained(engine: Engine, recording: Recording, config: Config, outcome: Outcome) -> Difference | None:
    """The first difference, with the stage that two pipelines on equal logits name where the trace names none."""
    first, suspect = outcome.first, outcome.suspect
    if first is None or suspect is None:
        return first
    from framework.engine.suspects import find_stage

    found = find_stage(engine, recording.config.sampler, suspect, first.recorded)
    if isinstance(found, Unlike):
        return replace(first, stage=found.stage, how=found.how)
    return replace(first, how="; ".join(part for part in (first.how, found) if part))


def _config_lines(recorded: Config, now: Config) -> list[str]:
    ignored = ("engine.max_model_len", "engine.trace_stages", "engine.trace_prompts")
    others = {key: pair for key, pair in what_differs(recorded, now).items() if key not in ignored}
    lines = [f"{key} is {now_value}, and was {then}" for key, (then, now_value) in others.items()]
    if recorded.sampler.name != now.sampler.name:
        lines.append(f"sampler is {now.sampler.name}, and was {recorded.sampler.name}")
    return [*lines, *(f"sampler.stages: {line}" for line in unlike_configs(recorded.sampler, now.sampler))]


def _params_lines(config: Config, args: RunArgs) -> list[str]:
    """Parameters that a word has given to all requests."""
    params = config.sampler.params
    return [f"sampler.{name} is {params[name]} for all requests" for name in typed_params(args.typed) if name in params]


def _version_lines(recording: Recording, engine: Engine) -> list[str]:
    then, now = recording.facts.get("versions", {}), engine.plugins.versions
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name} is {now.get(name, 'not installed')}, and was {then.get(name, 'not installed')}" for name in names]


# -------------------------------------------------------------------------------------------------------- printing


def _text(report: ReplayReport) -> str:
    r = report
    lines = [
        f"{r.trace}: {r.steps} steps, {r.requests} requests, {r.tokens} tokens executed again in {r.seconds:.1f} s; "
        f"{r.compared} compared"
    ]
    lines += ["equal: every row did what was recorded"] if r.first is None else _unlike_lines(r, r.first)
    if r.config:
        lines += ["", "the configuration differs:", *(f"  {line}" for line in r.config)]
    return "\n".join(lines)


def _unlike_lines(r: ReplayReport, first: Difference) -> list[str]:
    lines = [
        "",
        *_first_lines(first),
        "",
        f"{r.unlike} of {r.tokens} rows differ, {r.unlike_tokens} of them in their token",
    ]
    lines += [_short(one) for one in r.others[:_LISTED]]
    if len(r.others) > _LISTED:
        lines.append(f"  and {len(r.others) - _LISTED} requests more")
    if r.broken is not None:
        lines.append("the replay ended there, since a stage raised")
    return lines


def _first_lines(first: Difference) -> list[str]:
    return [
        f"first difference: step {first.step} (line {first.line}), request {_name(first.request)}, "
        f"stage {first.stage or 'unknown'}",
        f"  {first.how}",
        f"  position {first.position}: {_tokens(first)}",
    ]


def _short(one: Difference) -> str:
    stage = "" if one.stage is None else f", stage {one.stage}"
    return f"  request {_name(one.request)}: first at step {one.step}{stage}, position {one.position}: {_tokens(one)}"


def _tokens(one: Difference) -> str:
    if one.recorded == one.now:
        return f"{_token(one.now)} both times"
    return f"{_token(one.recorded)} recorded, {_token(one.now)} now"


def _token(token: int | None) -> str:
    return "no token" if token is None else f"token {token}"


def _name(request_id: str) -> str:
    """An id as it is read: a completion of one with n > 1 has its number behind a sign that no screen shows."""
    from framework.engine.siblings import SIBLING_MARK

    return request_id.replace(SIBLING_MARK, "/")
