"""`bench=serve`: a server under load, measured at the client: ours, started for it, or any OpenAI-compatible one.

A round is a sweep over rates or over numbers of requests under way, each of them a point. How requests are drawn, sent,
read and counted is in the modules beside; nothing of an engine is in this process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from framework.interfaces import BenchRound
from framework.runs.bench.serve.arrivals import moments, unit_gaps
from framework.runs.bench.serve.client import Client, cut, key_from
from framework.runs.bench.serve.cpu import cpu_seconds, own_cpu_seconds
from framework.runs.bench.serve.drive import Point, drive
from framework.runs.bench.serve.figures import UNITS, Measured, label_of, measure
from framework.runs.bench.serve.options import SATURATION, LoadOptions
from framework.runs.bench.serve.pictures import draw
from framework.runs.bench.serve.prompts import Prompts
from framework.runs.bench.serve.rows import point_rows, remarks
from framework.runs.bench.serve.search import best_of, search
from framework.runs.bench.serve.server import OwnServer
from framework.runs.bench.workload import check_lengths
from framework.runs.table import table
from framework.runs.unread import refuse_unread
from framework.server.options import ServerOptions

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs
    from framework.runs.bench.report import Report

NUM_WARM = 8
"""Requests of a pass of warm-up, at most."""
NUM_MEETING = 4
"""Tokens in and out of the first question to a server, at most."""
AT_BEST = "rate of saturation"
OF_THE_ENGINE = ("model", "engine", "kv_cache", "scheduler", "sampler", "backend", "attention", "policy", "spec_decode",
                 "kv_connector", "grammar", "executor", "server")  # fmt: skip


class Serve:
    """`interfaces.Bench`. Every point gets the same requests and the same gaps between them."""

    needs_engine: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: LoadOptions, config: Config) -> None:
        self._options, self._config = options, config
        self._salt = options.salt if options.salt is not None else time.time_ns() % 2**31
        self._prompts = Prompts(options, self._salt)
        self._gaps = unit_gaps(options.arrivals, options.burstiness, options.num_prompts, options.seed)
        self._key = key_from(os.environ, options.api_key_env)
        self._loads = _loads(options)
        self._num_passes, self._server, self._client = 0, None, None  # type: int, OwnServer | None, Client | None
        self._server_options = ServerOptions()
        num_points = options.max_points if self._loads is None else len(self._loads)
        self.num_units = options.num_prompts * num_points
        self.units = self._units()
        self.shown = _shown(options)
        self.facts: dict[str, Any] = {}
        if options.url is None:
            check_lengths(config.engine.max_model_len, *self._prompts.max_len, "bench.input_len")

    def begin(self, args: RunArgs) -> None:
        """Refuses words for an engine where another server is measured; notes the options of ours."""
        if self._options.url is not None:
            refuse_unread("bench", args, dict.fromkeys(OF_THE_ENGINE, "the server of bench.url has its own settings"))
            return
        self._server_options = args.server
        self._key = next(iter(args.server.keys()), None)

    def check(self, engine: None) -> None:
        """Nothing that `warm_up` and the first round would not find out."""

    def warm_up(self, number: int, advance: Callable[[int], Any]) -> None:
        client = self._ready(advance)
        asks = self._next_pass()[:NUM_WARM]
        point = asyncio.run(drive(client, asks, None, len(asks), None, advance))
        if point.interrupt is not None:
            raise point.interrupt

    def round(self, engine: None, number: int, advance: Callable[[int], Any]) -> BenchRound:
        self._ready(advance)
        done: list[Measured] = []
        best: float | None = None
        try:
            if self._loads is not None:
                for load in self._loads:
                    self._measure(load, done, advance)
            else:
                best = search(
                    lambda rate: self._worth(rate, done, advance), self._options.rate_from, self._options.max_points
                )
        except KeyboardInterrupt as interrupt:
            if interrupt.args == () or not done:
                raise
            best = self._best_so_far(done) if self._loads is None else None
        return BenchRound(self._figures(done, best), self._samples(done), [one.as_json() for one in done])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def lines(self, report: Report) -> list[str]:
        """A line a figure for a single point, else a row a point; and what is to be said about them."""
        single = self._loads is not None and len(self._loads) == 1
        rows = report.figure_lines() if single else table(point_rows(report.rounds), None, "  ")
        best = [] if self._loads is not None else [f"{AT_BEST}: {report.medians()[AT_BEST]:.3g} requests a second"]
        said = [f"  {line}" for line in (*best, *remarks(report.rounds))]
        return [*rows, *([""] if said else []), *said]

    def plot(self, path: str, report: Report) -> None:
        draw(path, report)

    # ------------------------------------------------------------------------------------------------- points

    def _ready(self, advance: Callable[[int], Any]) -> Client:
        """The client of a server that has answered once."""
        if self._client is not None:
            return self._client
        o = self._options
        if o.url is None:
            self._server = OwnServer(self._config, self._server_options, o.start_timeout_s, lambda: advance(0))
        url = o.url if self._server is None else self._server.url
        assert url is not None, "there is a server of ours where no other is named"
        client = Client(o, url, self._key)
        try:
            asyncio.run(self._meet(client))
        finally:
            self._check_server()
        self.facts |= {
            "server": url if self._server is None else "of this configuration", "model": client.model, "api": o.api,
            **client.dialect.facts(), "salt": self._salt,
        }  # fmt: skip
        self._client = client
        return client

    async def _meet(self, client: Client) -> None:
        async with client.session() as session:
            await client.meet(session, cut(self._next_pass()[0], NUM_MEETING))

    def _next_pass(self) -> list[Any]:
        """The requests, with beginnings that no pass before had."""
        self._num_passes += 1
        return self._prompts.asks(self._num_passes)

    def _measure(self, load: Mapping[str, float], done: list[Measured], advance: Callable[[int], Any]) -> Measured:
        """One point, added to `done`. Raises KeyboardInterrupt after a signal, the point with what is there."""
        assert self._client is not None, "the server was met"
        o, asks = self._options, self._next_pass()
        concurrency = load.get("concurrency")
        due = moments(self._gaps, load.get("rate")) if concurrency is None else None
        pid = o.server_pid if self._server is None else self._server.pid
        own, server = own_cpu_seconds(), None if pid is None else cpu_seconds(pid)
        number = None if concurrency is None else int(concurrency)
        point: Point = asyncio.run(drive(self._client, asks, due, number, o.max_s, advance))
        self._check_server()
        costs = {"client CPU": own_cpu_seconds() - own}
        if pid is not None and server is not None and (after := cpu_seconds(pid)) is not None:
            costs["server CPU"] = after - server
        one = measure(point, load, o.slo, costs, o.max_late_ms)
        if point.outcomes or point.interrupt is None:
            done.append(one)
        if point.interrupt is not None:
            raise point.interrupt
        advance(len(asks) - point.num_told)
        return one

    def _check_server(self) -> None:
        """RuntimeError where our server is gone: what it did not answer any more is no figure of a load."""
        if self._server is not None:
            self._server.check()

    def _worth(self, rate: float, done: list[Measured], advance: Callable[[int], Any]) -> float:
        return _worth_of(self._measure({"rate": rate}, done, advance))

    def _best_so_far(self, done: list[Measured]) -> float:
        return best_of({one.load["rate"]: _worth_of(one) for one in done})

    # ------------------------------------------------------------------------------------------------- figures

    def _units(self) -> dict[str, str]:
        if self._loads is None:
            return {AT_BEST: "1/s", **UNITS}
        if len(self._loads) == 1:
            return dict(UNITS)
        return {f"{name}, {label_of(load)}": unit for load in self._loads for name, unit in UNITS.items()}

    def _figures(self, done: list[Measured], best: float | None) -> dict[str, float]:
        if best is not None:
            return {AT_BEST: best, **next(one.figures for one in done if one.load["rate"] == best)}
        if self._loads is not None and len(self._loads) == 1:
            return dict(done[0].figures)
        return {f"{name}, {one.label}": value for one in done for name, value in one.figures.items()}

    def _samples(self, done: list[Measured]) -> dict[str, Any]:
        return {f"{name}, ms": values for name, values in done[0].samples.items()} if len(done) == 1 else {}


def _loads(options: LoadOptions) -> list[dict[str, float]] | None:
    """The points of a round; None where they are searched for."""
    if options.rate == SATURATION:
        return None
    if options.concurrencies is not None:
        return [{"concurrency": number} for number in options.concurrencies]
    return [{"rate": rate} for rate in options.rates] if options.rates else [{}]


def _shown(options: LoadOptions) -> dict[str, Any]:
    """How much is sent, and every option that was chosen."""
    always = ("num_prompts", "input_len", "output_len") if options.lengths != "sharegpt" else ("num_prompts",)
    chosen = [one.name for one in fields(options) if getattr(options, one.name) != getattr(LoadOptions(), one.name)]
    return {name: getattr(options, name) for name in dict.fromkeys((*always, *chosen)) if name not in ("url", "model")}


def _worth_of(one: Measured) -> float:
    return one.figures["goodput" if "goodput" in one.figures else "requests"]
