"""Tokens in and out of each request: fixed, uniform, or like ShareGPT's conversations. Pure arithmetic from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.runs.bench.serve.options import LoadOptions

STREAM = 2
Z90 = 1.2815515655446004
"""Quantile 0.9 of the standard normal distribution."""


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution with this median and this quantile 0.9."""

    median: float
    p90: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.median * np.exp(rng.standard_normal(count) * math.log(self.p90 / self.median) / Z90)


SHAREGPT_INPUT = Lognormal(1730, 5696)
SHAREGPT_OUTPUT = Lognormal(415, 834)
"""Tokens of openchat_sharegpt4, whose requests above 8192 tokens in all are left out: Agrawal et al., Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve (OSDI 2024, arXiv 2403.02310), table 2."""


def draw_lengths(options: LoadOptions) -> tuple[list[int], list[int]]:
    """(tokens in, tokens out) of the requests, without a shared prefix."""
    rng, count = np.random.default_rng([options.seed, STREAM]), options.num_prompts
    if options.lengths == "fixed":
        return [options.input_len] * count, [options.output_len] * count
    if options.lengths == "uniform":
        inputs = rng.integers(options.input_len_min, options.input_len + 1, count)
        return inputs.tolist(), rng.integers(options.output_len_min, options.output_len + 1, count).tolist()
    return _sharegpt(rng, count, options.scale, options.max_total)


def _sharegpt(rng: np.random.Generator, count: int, scale: float, max_total: int) -> tuple[list[int], list[int]]:
    """Pairs of at most `max_total` tokens, which are drawn again and not cut: a cut would pile them up at the limit."""
    kept: list[tuple[int, int]] = []
    for _ in range(100):
        inputs = np.ceil(scale * SHAREGPT_INPUT.draw(rng, count))
        outputs = np.ceil(scale * SHAREGPT_OUTPUT.draw(rng, count))
        pairs = zip(inputs.astype(int).tolist(), outputs.astype(int).tolist(), strict=True)
        kept += [pair for pair in pairs if sum(pair) <= max_total]
        if len(kept) >= count:
            return [pair[0] for pair in kept[:count]], [pair[1] for pair in kept[:count]]
    raise ConfigError(
        f"bench.max_total={max_total} leaves out nearly every request at bench.scale={scale}. Raise it, or lower scale"
    )
