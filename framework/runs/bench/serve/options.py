"""Keys of `bench=serve`, checked as far as they can be without a server. Imports no torch and no network library.

The composer and `Serve` read it; what a key means is said here and in `conf/bench/serve.yaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.config import check_count
from framework.errors import ConfigError, as_typed, no_such_choice

SATURATION = "saturation"
SLO_KEYS = ("ttft_ms", "tpot_ms", "e2e_ms")
SET_HERE = {
    "max_tokens": "bench.output_len", "stream": "the figures need a stream", "stream_options": "the figures need usage",
    "n": "a request here has one completion", "seed": "bench.seed", "ignore_eos": "bench.ignore_eos",
    "prompt": "bench.input_len", "messages": "bench.input_len", "model": "bench.model",
}  # fmt: skip
"""Fields of a request that the workload sets, and the key or the reason for it."""


@dataclass(frozen=True)
class LoadOptions:
    """Where the requests go, what they are, and when they are sent.

    url, model     of an OpenAI-compatible server (null: one of ours, started for it); null: its first model
    api            completions or chat
    api_key_env    name of the environment variable that holds the key
    server_pid     process whose CPU seconds count as the server's; one that was started here is known
    num_prompts    requests of a point
    rate           requests a second, one or several, or `saturation`; null without a concurrency: all at once
    concurrency    so many requests at any time, one number or several, instead of a rate
    arrivals       poisson, burst (gamma gaps of shape `burstiness`, 1 is Poisson) or constant
    lengths        fixed, uniform (from *_min up to *_len) or sharegpt (lognormal, `max_total` and `scale` apply)
    shared_prefix_len, num_shared_prefixes  tokens before the drawn ones, equal in each of so many groups
    prompts        ids, text, or auto: ids where the server takes them; token_ids: they are drawn from [low, high)
    sampling       fields of each request, as they are; ignore_eos, usage_per_chunk: asked for where they are taken
    seed, salt     of everything drawn; of the first tokens of the prompts, which keep the prefix cache of other runs
                   away: null takes another one in every run
    slo            ttft_ms, tpot_ms, e2e_ms that a request must meet to count as goodput
    max_s          seconds of a point, null = until all are answered; request_timeout_s: of one request
    max_late_ms    lateness of the generator, p99, beyond which a point is marked
    rate_from, max_points  the first rate of a search for saturation, and how many rates it may try
    start_timeout_s  seconds that our server has to be ready
    """

    url: str | None = None
    model: str | None = None
    api: str = "completions"
    api_key_env: str | None = None
    server_pid: int | None = None
    num_prompts: int = 32
    rate: Any = None
    concurrency: Any = None
    arrivals: str = "poisson"
    burstiness: float = 0.5
    lengths: str = "fixed"
    input_len: int = 128
    input_len_min: int = 1
    output_len: int = 32
    output_len_min: int = 1
    scale: float = 1.0
    max_total: int = 8192
    shared_prefix_len: int = 0
    num_shared_prefixes: int = 1
    prompts: str = "auto"
    token_ids: list[int] = field(default_factory=lambda: [1000, 8000])
    sampling: dict[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    usage_per_chunk: bool = False
    seed: int = 0
    salt: int | None = None
    slo: dict[str, Any] = field(default_factory=dict)
    max_s: float | None = None
    request_timeout_s: float = 600.0
    max_late_ms: float = 50.0
    rate_from: float = 1.0
    max_points: int = 8
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, choices in (
            ("api", ("completions", "chat")),
            ("arrivals", ("poisson", "burst", "constant")),
            ("lengths", ("fixed", "uniform", "sharegpt")),
            ("prompts", ("auto", "ids", "text")),
        ):
            if getattr(self, name) not in choices:
                raise no_such_choice(f"bench.{name}", getattr(self, name), choices)
        for name in (
            "num_prompts",
            "input_len",
            "input_len_min",
            "output_len",
            "output_len_min",
            "num_shared_prefixes",
        ):
            check_count(f"bench.{name}", getattr(self, name), 1)
        for name, least in (("shared_prefix_len", 0), ("max_points", 3), ("max_total", 2), ("seed", 0), ("salt", 0)):
            check_count(f"bench.{name}", getattr(self, name), least)
        for name in ("burstiness", "scale", "request_timeout_s", "max_late_ms", "rate_from", "start_timeout_s"):
            _check_positive(f"bench.{name}", getattr(self, name))
        if self.max_s is not None:
            _check_positive("bench.max_s", self.max_s)
        self._check_load()
        self._check_requests()
        self._check_server()

    def _check_load(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(
                f"bench.rate={as_typed(self.rate)} and bench.concurrency={as_typed(self.concurrency)} exclude each "
                "other: requests come at their times, or when others have ended. Leave one out"
            )
        for rate in self.rates or ():
            _check_positive("bench.rate", rate, f", or {SATURATION}" if isinstance(rate, str) else "")
        for number in self.concurrencies or ():
            if isinstance(number, bool) or not isinstance(number, int):
                raise ConfigError(f"bench.concurrency={as_typed(number)} must be a whole number, or a list of them")
            check_count("bench.concurrency", number, 1)
        if self.arrivals != "poisson" and self.rate is None:
            raise ConfigError(f"bench.arrivals={self.arrivals} needs a rate. Add bench.rate=4, or leave it out")

    def _check_requests(self) -> None:
        for name in ("input_len", "output_len") if self.lengths == "uniform" else ():
            low, high = getattr(self, f"{name}_min"), getattr(self, name)
            if low > high:
                raise ConfigError(f"bench.{name}_min={low} is above bench.{name}={high}. Lower it, or leave it out")
        low_high = self.token_ids
        if len(low_high) != 2 or not 0 <= low_high[0] < low_high[1]:
            raise ConfigError(f"bench.token_ids={low_high} must be [low, high] with 0 <= low < high")
        if self.prompts == "ids" and self.api == "chat":
            raise ConfigError("bench.prompts=ids: a chat is text. Use bench.api=completions, or bench.prompts=text")
        for name in self.sampling:
            if name in SET_HERE:
                raise ConfigError(f"bench.sampling.{name} is set by the workload ({SET_HERE[name]}). Leave it out")
        for name, limit in self.slo.items():
            if name not in SLO_KEYS:
                raise no_such_choice("bench.slo", name, SLO_KEYS)
            _check_positive(f"bench.slo.{name}", limit)

    def _check_server(self) -> None:
        if self.url is not None and not re.match(r"https?://", self.url):
            raise ConfigError(f"bench.url={as_typed(self.url)} must begin with http:// or https://")
        if self.url is None:
            for name in ("model", "api_key_env", "server_pid"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"bench.{name}={as_typed(getattr(self, name))} speaks of another server. Add bench.url=URL"
                    )

    @property
    def rates(self) -> list[float] | None:
        """The rates of a sweep; None where there are none, or where they are searched for."""
        if self.rate is None or self.rate == SATURATION:
            return None
        return _several("bench.rate", self.rate)

    @property
    def concurrencies(self) -> list[int] | None:
        return None if self.concurrency is None else _several("bench.concurrency", self.concurrency)


def _several(key: str, value: Any) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ConfigError(f"{key}=[] holds no number. Write {key}=[1,2,4]")
        if len(set(map(repr, value))) < len(value):
            raise ConfigError(f"{key}={as_typed(list(value))} holds a number twice. Use run.rounds to repeat them")
        return list(value)
    return [value]


def _check_positive(key: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ConfigError(f"{key}={as_typed(value)} must be a number above 0{otherwise}")
