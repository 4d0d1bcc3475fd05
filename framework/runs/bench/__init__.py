"""`run=bench`: a workload of kind `bench`, passed a few times over one engine, as a table, JSON and a plot.

Every number stands beside machine, versions and command, with its median and its spread over the rounds. An interrupt
ends the round it comes in; the rounds before it are reported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from framework.config import build_options
from framework.plugins import registry
from framework.runs.bench.plot import write_plot
from framework.runs.bench.profile import check_profile, profile_round
from framework.runs.bench.report import Report
from framework.runs.engines import open_engine
from framework.runs.figures import Figures
from framework.runs.loading import announce
from framework.runs.options import BenchOptions
from framework.runs.output_file import OutputFile, refuse_same_file
from framework.runs.signals import Stop, held_signals
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.interfaces import Bench, BenchRound
    from framework.runs import RunArgs
    from framework.runs.engines import KeptWeights


def run(config: Config, args: RunArgs) -> dict[str, float]:
    """Prints the report; `output=` gets it as JSON, `run.plot=` as SVG, `run.profile=` a trace of a few steps.

    Returns the medians with their units, the metrics of a sweep.
    """
    options = build_options(BenchOptions, args.options, "run")
    plugins, name = registry(), args.bench.name
    bench: Bench = plugins.load_target("bench", name)(plugins.build_options("bench", name, args.bench.options), config)
    _refuse(args, bench)
    refuse_same_file(
        {"output": args.output, "run.plot": options.plot, "run.profile": options.profile, "trace": config.trace}
    )
    if options.profile is not None:
        check_profile(options.profile, bench, name)
    report = Report(name, dict(args.bench.options), dict(bench.units), options.warmup, options.rounds, args.command)
    with ExitStack() as stack:
        sink = stack.enter_context(OutputFile(args.output)) if args.output else None
        stop = stack.enter_context(held_signals())
        _measure(bench, config, args.kept, options, report, stop)
        if not report.rounds:
            print("no round was done, so there is no report", file=sys.stderr)
            stop.end()
        _show(report, options, sink, bench)
        stop.end()
    return Figures(report.medians(), report.units)


def _refuse(args: RunArgs, bench: Bench) -> None:
    texts = ("prompt", "system", "prompts_file", "target")
    refuse_texts("bench", args, dict.fromkeys(texts, "the keys under bench say what runs"))
    refuse_unread("bench", args, getattr(bench, "unread", {}))
    if hasattr(bench, "begin"):
        bench.begin(args)
    else:
        refuse_unread("bench", args, {"server": OF_BENCH["server"]})


def _measure(
    bench: Bench, config: Config, kept: KeptWeights | None, options: BenchOptions, report: Report, stop: Stop
) -> None:
    """Adds the rounds to the report, those before an interrupt when there is one."""
    with ExitStack() as stack:
        engine = None
        if bench.needs_engine:
            announce(config)
            engine = stack.enter_context(open_engine(config, kept))
            report.engine = dict(engine.facts)
        elif kept is not None:
            kept.give_up()
        bench.check(engine)
        stack.callback(getattr(bench, "close", lambda: None))
        num_rounds = options.warmup + options.rounds
        num_passes = num_rounds + (options.profile is not None)
        advance = stack.enter_context(_Bar(num_passes * bench.num_units, engine, stop))
        try:
            for number in range(num_rounds):
                before = 0 if engine is None else engine.core.last_step.num_steps
                if number < options.warmup and hasattr(bench, "warm_up"):
                    bench.warm_up(number, advance)
                    continue
                done: BenchRound = bench.round(engine, number, advance)
                if number >= options.warmup:
                    report.rounds.append(done)
            if options.profile is not None and engine is not None:
                steps = engine.core.last_step.num_steps - before
                report.profile = profile_round(options.profile, bench, engine, num_rounds, advance, steps)
        except KeyboardInterrupt as interrupt:
            if not interrupt.args:
                raise
    report.engine, report.shown = report.engine or dict(getattr(bench, "facts", {})), getattr(bench, "shown", None)
    report.interrupted = len(report.rounds) < options.rounds or stop.number is not None


class _Bar:
    """Called with the units that are done: moves a bar at a terminal, and ends the round after a signal."""

    def __init__(self, total: int, engine: Engine | None, stop: Stop) -> None:
        from framework.engine.progress import Progress

        self._stop, self._stack = stop, ExitStack()
        self._update: Callable[[int], Any]
        if engine is not None:
            self._update = self._stack.enter_context(Progress(total, engine, sys.stderr.isatty())).update
        else:
            from tqdm import tqdm

            quiet = not sys.stderr.isatty()
            bar = tqdm(total=total, unit="run", file=sys.stderr, dynamic_ncols=True, leave=False, disable=quiet)
            self._update = self._stack.enter_context(bar).update

    def __call__(self, num_done: int) -> None:
        self._update(num_done)
        self._stop.end()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()


def _show(report: Report, options: BenchOptions, sink: OutputFile | None, bench: Bench) -> None:
    if sink is not None:
        sink.begin()
        sink.write(report.as_json())
    if options.json:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False), flush=True)
    else:
        own = bench.lines(report) if hasattr(bench, "lines") else None
        print("\n".join(report.lines(own)), flush=True)
    if options.plot is not None:  # the last: one that cannot be written should not cost the report
        if hasattr(bench, "plot"):
            bench.plot(options.plot, report)
        else:
            write_plot(options.plot, report, bench.parts)
