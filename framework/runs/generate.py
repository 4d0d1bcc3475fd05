"""`run=generate`: text from the default prompts, `prompt=` or `prompts_file=`, to stdout or `output=`.

One prompt streams to stdout as it is made; several are printed in order when they are done. Progress and the closing
line go to stderr. Requests reach the engine through the same doors as everybody else's.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError
from framework.request import CompletionOutput, Logprob, OutputKind, RequestOutput, SamplingParams
from framework.runs import Incomplete
from framework.runs.engines import open_engine
from framework.runs.loading import announce
from framework.runs.output_file import OutputFile, refuse_same_file
from framework.runs.signals import held_signals
from framework.runs.unread import OF_BENCH, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.runs import RunArgs

DEFAULT_PROMPTS = (
    "The three primary colours are",
    "A good way to learn a new language is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
)
NO_LINE_RAN = "prompts_file: every line was refused, so nothing ran. Correct the lines that are named above"
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_PROMPT_KEYS = ("cache_salt", "priority")
"""Keys of a line that say more of its prompt; whatever else it has is a parameter."""


@dataclass
class Job:
    """One prompt of the run.

    number    of its line, from 1; the engine knows the job by it
    params    SamplingParams fields that its line names
    given_id  id as its line writes it, a string or an integer; None when it has none
    """

    number: int
    prompt: Any
    params: dict[str, Any] = field(default_factory=dict)
    given_id: str | int | None = None

    @property
    def request_id(self) -> str:
        return str(self.number)

    @property
    def shown_id(self) -> str | int:
        """Its id in the output and in messages."""
        return self.request_id if self.given_id is None else self.given_id


def run(config: Config, args: RunArgs) -> dict[str, float]:
    """Generates and prints; returns the closing line's figures (the metrics of a sweep)."""
    _refuse(args, config.trace)
    with ExitStack() as stack:
        jobs, num_refused = _read_jobs(args)
        # Before the model loads: a folder that is not there should not cost a load.
        sink = stack.enter_context(OutputFile(args.output)) if args.output else None
        if not jobs:
            return _nothing_to_do(args, sink)
        announce(config)
        engine = stack.enter_context(open_engine(config, args.kept))
        # Several completions of one prompt are printed one after the other, so that they do not run into each other.
        streams = sink is None and args.prompt is not None and engine.admission.defaults.n == 1
        return _Generation(engine, sink, streams, num_refused).run(jobs)


def _nothing_to_do(args: RunArgs, sink: OutputFile | None) -> dict[str, float]:
    print(f"prompts_file={args.prompts_file}: it has no lines, so nothing ran", file=sys.stderr)
    if sink is not None:
        sink.begin()
    return {"requests": 0.0}


def _refuse(args: RunArgs, trace: str | None) -> None:
    refuse_unread("generate", args, OF_BENCH)
    if args.prompt is not None and args.prompts_file is not None:
        raise ConfigError("prompt and prompts_file are both given; use one of them")
    if args.system is not None:
        raise ConfigError("system belongs to run=chat; use it, or put messages into prompts_file")
    if args.target is not None:
        raise ConfigError(f"target={args.target} means nothing to run=generate; leave it out")
    if args.output == "":
        raise ConfigError("output= is empty; name a file, or leave it out to print the texts")
    if args.prompt == "":
        raise ConfigError("prompt=: the prompt is empty; give at least one character, or leave it out")
    if args.prompts_file == "":
        raise ConfigError("prompts_file= is empty; name a UTF-8 JSON-lines file, or leave it out")
    refuse_same_file({"prompts_file": args.prompts_file, "output": args.output, "trace": trace})


# --------------------------------------------------------------------------------------------------------- prompts


def _read_jobs(args: RunArgs) -> tuple[list[Job], int]:
    """(jobs, number of lines that are none)."""
    if args.prompts_file is not None:
        return _read_file(args.prompts_file)
    prompts = DEFAULT_PROMPTS if args.prompt is None else (args.prompt,)
    return [Job(number, prompt) for number, prompt in enumerate(prompts, start=1)], 0


def _read_file(path: str) -> tuple[list[Job], int]:
    """Jobs of a JSON-lines file, and how many lines were refused: each is reported with its number, the rest runs.

    ConfigError when every line is bad; a file without lines has no jobs.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(f"prompts_file={path}: {reason}; name a UTF-8 JSON-lines file") from None
    jobs, seen, num_bad = [], set[str](), 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            job = _job(_parsed(line), number)
            if job.given_id is not None and str(job.given_id) in seen:
                raise ValueError(f"id '{job.given_id}' stands in an earlier line as well")
        except (ValueError, TypeError, RecursionError) as e:
            _report(number, e)
            num_bad += 1
            continue
        if job.given_id is not None:
            seen.add(str(job.given_id))
        jobs.append(job)
    if num_bad and not jobs:
        raise ConfigError(NO_LINE_RAN)
    return jobs, num_bad


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"is not UTF-8: byte 0x{line[e.start]:02x} at {e.start}") from None
    except json.JSONDecodeError as e:
        what = f"is not JSON: {e.msg} at column {e.colno}"
        raise ValueError(f'{what}; write an object, as in {{"prompt": "Hi"}}') from None


def _report(number: int, error: Exception) -> None:
    print(f"prompts_file line {number}: {error}", file=sys.stderr)


def _job(line: Any, number: int) -> Job:
    if not isinstance(line, dict):
        raise TypeError(f"must be a JSON object, got {type(line).__name__}")
    given = [k for k in _PROMPTS if k in line]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of prompt, prompt_token_ids, messages; got {given or 'none'}")
    params = {k: v for k, v in line.items() if k not in (*_PROMPTS, *_PROMPT_KEYS, "id")}
    SamplingParams(**params)  # checked here, so that the error has its line
    prompt = {k: line[k] for k in (*given, *_PROMPT_KEYS) if k in line}
    return Job(number, prompt, params, _given_id(line) if "id" in line else None)


def _given_id(line: dict[str, Any]) -> str | int:
    given: Any = line["id"]
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise TypeError(f"id must be a string or an integer, got {given!r}")
    if given == "":
        raise ValueError("id must not be empty; leave it out, or write a string or an integer")
    str(given).encode()  # an unpaired surrogate is a ValueError, and could not be written to the output
    return given


# ------------------------------------------------------------------------------------------------------ generation


class _Generation:
    """Admits the jobs, steps the engine, prints or writes what finishes."""

    def __init__(self, engine: Engine, sink: OutputFile | None, streams: bool, num_refused: int = 0) -> None:
        self._num_refused = num_refused
        self._engine, self._sink, self._streams = engine, sink, streams
        self._jobs: dict[str, Job] = {}
        self._order: list[str] = []  # ids of the jobs
        self._done: dict[str, RequestOutput] = {}
        self._num_tokens = 0
        self._next = 0  # position, in order of the jobs, of the next one to print

    def run(self, jobs: list[Job]) -> dict[str, float]:
        from framework.engine.progress import Progress

        start = perf_counter()
        for job in jobs:
            self._admit(job)
        if jobs and not self._jobs:
            raise ConfigError(NO_LINE_RAN)
        if self._sink is not None:
            self._sink.begin()
        show = sys.stderr.isatty() and not self._streams
        with held_signals() as stop:
            with Progress(len(self._jobs), self._engine, show) as progress:
                try:
                    while self._engine.has_unfinished_requests() and stop.number is None:
                        finished = [self._take(o) for o in self._engine.step()]
                        progress.update(sum(finished))
                    if stop.number is not None:
                        self._break_off()
                finally:
                    self._print_done(all_of_them=True)
                elapsed = perf_counter() - start
                prefill, decode = progress.rates()
            figures = self._close(elapsed, prefill, decode)
            stop.end()
        self._raise_incomplete(figures)
        return figures

    def _raise_incomplete(self, figures: dict[str, float]) -> None:
        num_failed = sum(output.error is not None for output in self._done.values())
        said = []
        if self._num_refused:
            said.append(f"{self._num_refused} of {self._num_refused + len(self._jobs)} lines refused")
        if num_failed:
            said.append(f"{num_failed} of {len(self._jobs)} requests ended with an error")
        if said:
            raise Incomplete(f"{', '.join(said)}; they are named above", figures)

    def _break_off(self) -> None:
        """Ends what still runs, and keeps what it had: finish_reason is `abort`. What had not begun leaves nothing."""
        for request_id in self._jobs:
            for output in self._engine.end(request_id):
                if output.metrics.ttft is not None:
                    self._take(output)

    def _admit(self, job: Job) -> None:
        try:
            params = self._params(job)
            self._engine.add_request(job.request_id, self._prompt(job.prompt), params)
        except (ValueError, TypeError) as e:
            if isinstance(job.prompt, str):
                raise
            _report(job.number, e)
            self._num_refused += 1
            return
        self._jobs[job.request_id] = job
        self._order.append(job.request_id)

    def _params(self, job: Job) -> SamplingParams:
        defaults = self._engine.admission.defaults
        changes = dict(job.params)
        # Whatever kind is configured or stands in a line: a piece of a text is neither printed nor written for it.
        changes["output_kind"] = OutputKind.DELTA if self._streams else OutputKind.FINAL
        return defaults.replace(**changes)

    def _prompt(self, prompt: Any) -> Any:
        if not (isinstance(prompt, dict) and "messages" in prompt):
            return prompt
        from framework.engine.admission import chat_prompt

        rendered = chat_prompt(self._engine.tokenizer, prompt["messages"], add_generation_prompt=True)
        others = {k: v for k, v in prompt.items() if k != "messages"}
        checked = self._engine.admission.prompt({"prompt_token_ids": rendered.token_ids, **others})
        return replace(checked, text=rendered.text)

    def _take(self, output: RequestOutput) -> bool:
        """Prints a streamed piece or keeps a finished output; True when the request is finished."""
        self._num_tokens += sum(len(one.token_ids) for one in output.outputs)  # a piece, or the whole of a finished one
        if self._streams:
            if self._next == 0:
                sys.stdout.write(output.prompt or "")
                self._next = 1
            sys.stdout.write(output.outputs[0].text)
            sys.stdout.flush()
        if output.finished:
            self._done[output.request_id] = output
            if self._sink is not None:
                self._write(output)
            elif not self._streams:
                self._print_done()
        return output.finished

    def _write(self, output: RequestOutput) -> None:
        """One line a completion."""
        assert self._sink is not None
        shared: dict[str, Any] = {"metrics": asdict(output.metrics)}
        if output.error is not None:
            shared["error"] = output.error
        if output.prompt_logprobs is not None:
            shared["prompt_logprobs"] = [None if entry is None else _entry(entry) for entry in output.prompt_logprobs]
        for completion in output.outputs:
            line = {
                "id": self._jobs[output.request_id].shown_id,
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            self._sink.write({**line, **shared, **_logprobs(completion)})

    def _print_done(self, all_of_them: bool = False) -> None:
        """Prints finished outputs in the order of the prompts: as far as it has no gap, or all of them at the end."""
        if self._streams or self._sink is not None:
            if self._streams and all_of_them:
                print(flush=True)
            return
        while self._next < len(self._order) and (all_of_them or self._order[self._next] in self._done):
            output = self._done.get(self._order[self._next])
            self._next += 1
            if output is not None:
                for completion in output.outputs:
                    sys.stdout.write(f"{self._before(output, completion)}{completion.text}\n\n")
                sys.stdout.flush()

    def _before(self, output: RequestOutput, completion: CompletionOutput) -> str:
        """What stands before a text: its prompt, or where there is none, what tells it from its siblings."""
        if output.prompt is not None or len(output.outputs) == 1:
            return output.prompt or ""
        return f"[{self._jobs[output.request_id].shown_id}, {completion.index + 1} of {len(output.outputs)}] "

    def _close(self, elapsed: float, prefill: float, decode: float) -> dict[str, float]:
        """The closing line on stderr, and its figures; what prefill and decode mean stands at `Progress.rates`."""
        metrics = [o.metrics for o in self._done.values()]
        for request_id, output in self._done.items():
            if output.error is not None:
                print(f"request {self._jobs[request_id].shown_id}: {output.error}", file=sys.stderr)
        known = {
            "ttft_s": _mean([m.ttft for m in metrics if m.ttft is not None]),
            "tpot_s": _mean([m.tpot for m in metrics if m.tpot is not None]),
            "output_tokens_per_s": self._num_tokens / elapsed,
            "prefill_tokens_per_s": prefill or None,
            "decode_tokens_per_s": decode or None,
        }
        figures = {"requests": float(len(metrics)), **{k: v for k, v in known.items() if v is not None}}
        count = f"{len(metrics)} request{'s' * (len(metrics) != 1)}"
        print(f"{count}, {elapsed:.2f} s: {_shown(figures)}", file=sys.stderr)
        return figures


def _shown(figures: Mapping[str, float]) -> str:
    """The figures that there are: requests of one token have no TPOT and no decode."""
    shown = [f"TTFT {figures['ttft_s'] * 1e3:.0f} ms"] if "ttft_s" in figures else []
    if "tpot_s" in figures:
        shown.append(f"TPOT {figures['tpot_s'] * 1e3:.1f} ms")
    kinds = ("prefill", "decode")
    parts = [f"{k} {figures[f'{k}_tokens_per_s']:.0f}" for k in kinds if f"{k}_tokens_per_s" in figures]
    rates = f" ({', '.join(parts)} tok/s)" if parts else ""
    return ", ".join([*shown, f"{figures['output_tokens_per_s']:.1f} output tok/s{rates}"])


def _logprobs(completion: CompletionOutput) -> dict[str, Any]:
    """Of a request that asked for them: {token id: logprob} of each token, and their sum; null stands for -inf."""
    if completion.logprobs is None:
        return {}
    entries = [_entry(entry) for entry in completion.logprobs]
    return {"logprobs": entries, "cumulative_logprob": _finite(completion.cumulative_logprob)}


def _entry(entry: Mapping[int, Logprob]) -> dict[int, float | None]:
    return {token_id: _finite(one.logprob) for token_id, one in entry.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
