"""Requests of a benchmark: lengths, token ids and arrivals from a seed, and the loop that puts them through an engine.

The same seed gives the same requests everywhere. Nothing is measured here but the moments of each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.engine.collector import resting_collector
from framework.errors import ConfigError
from framework.request import OutputKind, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from framework.engine.engine import Engine
    from framework.request import RequestMetrics


@dataclass(frozen=True)
class Work:
    """One request. due: seconds after the start of the round at which it arrives."""

    token_ids: list[int]
    output_len: int
    due: float
    seed: int


@dataclass(frozen=True)
class Done:
    """metrics count from the moment at which the request was due: `late` seconds before the engine got it."""

    output: RequestOutput
    late: float

    @property
    def metrics(self) -> RequestMetrics:
        return self.output.metrics

    @property
    def ttft(self) -> float:
        assert self.metrics.ttft is not None, "a request of a benchmark has at least one token"
        return self.metrics.ttft + self.late


def lengths(rng: np.random.Generator, count: int, low: int | None, high: int) -> list[int]:
    """`count` lengths, evenly from low..high; all `high` without a low."""
    return [high] * count if low is None else rng.integers(low, high + 1, count).tolist()


def arrivals(rng: np.random.Generator, count: int, rate: float | None) -> list[float]:
    """Moments of a Poisson process of `rate` a second, the first at 0; all 0 without a rate."""
    if rate is None:
        return [0.0] * count
    gaps = rng.exponential(1.0 / rate, count)
    gaps[0] = 0.0
    return np.cumsum(gaps).tolist()


def ordinary_ids(engine: Engine) -> np.ndarray:
    """Token ids [V'] int64 without the ones that end a request: a model that has just seen one says little."""
    limits = engine.admission.limits
    return np.setdiff1d(np.arange(limits.vocab_size), np.array(sorted(limits.eos_token_ids), dtype=np.int64))


def tokens(rng: np.random.Generator, count: int, ids: np.ndarray) -> list[int]:
    """`count` of these ids by chance."""
    return rng.choice(ids, count).tolist()


def check_lengths(limit: int | None, input_len: int, output_len: int, key: str) -> None:
    """ConfigError when a request would be cut by the model's limit: the figures would be of another workload.

    limit  max_model_len: the configured one before anything loads, None when it is left open, and the engine's later
    """
    if limit is not None and input_len + output_len > limit:
        raise ConfigError(
            f"{key}={input_len} and bench.output_len={output_len} make {input_len + output_len} tokens, but "
            f"engine.max_model_len is {limit}. Shorten one of them, or raise engine.max_model_len"
        )


@resting_collector()
def pass_through(
    engine: Engine, work: Sequence[Work], salt: str, detokenize: bool, advance: Callable[[int], Any]
) -> tuple[list[Done], float]:
    """(finished requests in the order of `work`, seconds of all): each is admitted when it is due.

    salt  keeps the prefix cache of other rounds away, whose prompts are the same
    """
    done: dict[str, Done] = {}
    late: dict[str, float] = {}
    waiting = list(enumerate(work))
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1].due <= time.perf_counter() - start:
            index, one = waiting.pop(0)
            engine.add_request(str(index), _prompt(one, salt), _params(engine, one, detokenize))
            late[str(index)] = time.perf_counter() - start - one.due
        if engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            done.update({output.request_id: Done(output, late[output.request_id]) for output in finished})
            advance(len(finished))
        else:
            time.sleep(min(0.05, max(0.0, waiting[0][1].due - (time.perf_counter() - start))))
            advance(0)
    return [done[str(index)] for index in range(len(work))], time.perf_counter() - start


def _prompt(work: Work, salt: str) -> dict[str, Any]:
    return {"prompt_token_ids": work.token_ids, "cache_salt": salt}


def _params(engine: Engine, work: Work, detokenize: bool) -> SamplingParams:
    """The configured defaults, for a fixed number of tokens."""
    changes: dict[str, Any] = {
        "n": 1, "max_tokens": work.output_len, "ignore_eos": True, "seed": work.seed, "output_kind": OutputKind.FINAL,
    }  # fmt: skip
    if not detokenize:
        changes["detokenize"] = False
    return engine.admission.defaults.replace(**changes)
