"""When requests of an open loop arrive: gaps of mean one from a seed, stretched to a rate. Pure arithmetic.

Every rate and every server gets the same gaps, so that points of a sweep differ by nothing but the rate.
"""

from __future__ import annotations

import numpy as np

STREAM = 1
"""Number of this part's random stream below the seed: lengths and tokens have others, and do not shift it."""


def unit_gaps(arrivals: str, burstiness: float, count: int, seed: int) -> np.ndarray:
    """Gaps [count] float64 of mean 1 before each request, the first of them 0.

    poisson   exponential gaps
    burst     gamma gaps of shape `burstiness`: their variance is 1 / burstiness
    constant  1
    """
    rng = np.random.default_rng([seed, STREAM])
    if arrivals == "constant":
        gaps = np.ones(count)
    elif arrivals == "burst":
        gaps = rng.gamma(burstiness, 1.0 / burstiness, count)
    else:
        gaps = rng.exponential(1.0, count)
    gaps[0] = 0.0
    return gaps


def moments(gaps: np.ndarray, rate: float | None) -> list[float]:
    """Seconds after the start at which each request is due: all 0 without a rate."""
    return [0.0] * len(gaps) if rate is None else (np.cumsum(gaps) / rate).tolist()
