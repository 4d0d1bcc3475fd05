"""`interfaces.SamplerOps` of the host: temperature, thresholds, choice and logprobs with one walk over the logits.

Converts the model's logits, keeps the best of each group of 128 ids, and works on the few groups that matter from
there. Masks, biases and penalties are not fused: they are the stages' own. The sampler
pipeline calls in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.interfaces import FusedChoice, FusedLogprobs
from framework.sampling.interval import at_most, is_open
from framework_backends import cpu_thresholds
from framework_backends.cpu_draw import draw
from framework_backends.cpu_groups import Groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Rows
    from framework.interfaces import FusedChain

    Operands = Mapping[str, Mapping[str, Any]]
    Floats = NDArray[np.float32]

_THRESHOLDS: dict[str, tuple[Callable[[Groups, Floats, Any], Floats], str]] = {
    "min_p": (cpu_thresholds.min_p, "log_min_p"),
    "top_k": (cpu_thresholds.top_k, "k"),
    "top_p": (cpu_thresholds.top_p, "top_p"),
}


class CpuSamplerOps:
    """Fused sampling without state. Shapes follow from values, and nothing waits: host and device are one."""

    fuses = ("scale", *_THRESHOLDS, "argmax", "draw")
    compiles = False

    def apply(self, logits: Tensor, rows: Rows, chain: FusedChain) -> Tensor:
        """See `interfaces.SamplerOps.apply`."""
        factor = torch.from_numpy(_column(dict(chain), "scale", "factor", rows))
        return logits.float() * factor.unsqueeze(1)

    def bounds(self, logits: Tensor, rows: Rows, chain: FusedChain, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """See `interfaces.SamplerOps.bounds`."""
        with _quiet():
            found = _narrowed(logits, rows, dict(chain), (lo, hi))[1]
        assert found is not None, chain
        return torch.from_numpy(found), hi

    def sample(
        self, logits: Tensor, rows: Rows, chain: FusedChain, interval: tuple[Tensor, Tensor] | None
    ) -> FusedChoice:
        """See `interfaces.SamplerOps.sample`."""
        operands = dict(chain)
        draws = _column(operands, "draw", "draws", rows) if "draw" in operands else np.zeros(len(logits))
        drawing = np.flatnonzero(draws)
        with _quiet():
            groups, lo = _narrowed(logits, rows, operands, interval)
            ids = groups.best_ids() if len(drawing) < len(logits) else np.empty(len(logits), np.int64)
            if len(drawing):
                ids[drawing] = draw(groups, drawing, lo, rows.seed.numpy(), rows.position.numpy())
        value = groups.value(ids)
        told = np.where(np.isfinite(groups.top) & np.isfinite(value), ids, -1)
        return FusedChoice(*map(torch.from_numpy, (ids, told, groups.top, value)))

    def logprobs(self, logits: Tensor, ids: Tensor, k: int, *, is_log: bool) -> FusedLogprobs:
        """See `interfaces.SamplerOps.logprobs`."""
        groups = Groups(logits, with_mass="exact" if is_log else None)
        off = np.zeros((2, len(ids), 1), np.float32)
        if groups.mass is not None:
            off[0], off[1] = groups.top[:, None], torch.from_numpy(groups.mass).sum(-1, keepdim=True).log_().numpy()
        with _quiet():
            value = groups.value(ids.numpy())[:, None]
            above = groups.reaching(np.arange(len(ids)), value[:, 0], strictly=True)[0]
            best_ids, best = groups.first_ids(k)
            told = (value - off[0] - off[1])[:, 0], np.bincount(above, minlength=len(ids)).astype(np.int32) + 1
            top = best_ids, best - off[0] - off[1], _ranks(best)
        return FusedLogprobs(*map(torch.from_numpy, (*told, *top)))


def _quiet() -> np.errstate:
    """No word of rows that are not numbers, or so large that they are not looked at roughly."""
    return np.errstate(invalid="ignore", over="ignore")


def _narrowed(
    logits: Tensor, rows: Rows, operands: Operands, interval: tuple[Tensor, Tensor] | None
) -> tuple[Groups, Floats | None]:
    """(groups of the processed logits, the bound [L] behind the thresholds of a chain or None for none)."""
    lo = None
    factor = _column(operands, "scale", "factor", rows) if "scale" in operands else None
    if interval is not None:
        assert factor is None, "temperature behind a threshold"
        logits = at_most(logits.float(), interval[1])
        lo = None if is_open(interval[0]) else interval[0].numpy()
    limits = {name: _column(operands, name, word, rows) for name, (_, word) in _THRESHOLDS.items() if name in operands}
    groups = Groups(logits, factor, with_mass="rough" if lo is None and _needs_all_mass(limits) else None)
    if limits and lo is None:
        lo = np.full(len(logits), -np.inf, np.float32)
    for name, limit in limits.items():
        assert lo is not None
        lo = _THRESHOLDS[name][0](groups, lo, limit)
    return groups, lo


def _needs_all_mass(limits: Mapping[str, NDArray[Any]]) -> bool:
    """Whether some row's nucleus is one of the whole vocabulary: mass costs least while a block is in the cache."""
    if "top_p" not in limits:
        return False
    is_whole = limits["top_p"] < 1
    if "top_k" in limits:
        is_whole &= limits["top_k"] == 0
    if "min_p" in limits:
        is_whole &= limits["min_p"] == -np.inf
    return bool(is_whole.any())


def _column(operands: Operands, name: str, word: str, rows: Rows) -> NDArray[Any]:
    """[L] numbers of the rows out of a column of the request table."""
    column: NDArray[Any] = operands[name][word].numpy()[rows.req_idx.numpy()]
    return column


def _ranks(falling: Floats) -> NDArray[np.int32]:
    """[n, k] 1 + the place of the first that equals it, of values in falling order."""
    places = np.broadcast_to(np.arange(1, falling.shape[1] + 1, dtype=np.int32), falling.shape).copy()
    places[:, 1:][falling[:, 1:] == falling[:, :-1]] = 0
    return np.maximum.accumulate(places, axis=1)
