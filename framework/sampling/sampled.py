"""What a sampler gives of one step, and the feature bits by which a step knows what its rows want. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.sampling.logprobs import Measured

_NO_TOKEN = b"\xff" * 4
"""What -1 looks like in int32, and no two tokens side by side: their upper byte is smaller."""
DRAWS, LOGPROBS = 1 << 62, 1 << 63
"""Feature bits of the pipeline itself: the row is not greedy; it wants logprobs. The lower bits are the stages'."""


@dataclass(slots=True)
class SampleResult:
    """Tokens of one step, on the device; `collect` brings them to the host.

    ids     [L] int64, in range also for a row that has no distribution to choose from, where it means nothing
    told    [L] int64, the same but -1 for such a row: the one array that the host reads of every step
    top     [L] float32 largest logit after masks and penalties; chosen [L] float32 logit of the id that was taken
    """

    ids: Tensor
    told: Tensor
    top: Tensor
    chosen: Tensor
    req_idx_np: NDArray[np.int32]
    logprobs: Measured | None = None
    payloads: dict[str, Any] = field(default_factory=dict)
    _told_np: NDArray[np.int64] | None = None

    def tokens(self, num_rows: int) -> NDArray[np.int32] | None:
        """The tokens [num_rows, 1] of a step that is on the host, a copy; None where a row has none.

        Results of a captured step may be one object. A view of it is kept: with cold caches the first torch operation
        of a step costs as much as all that is done here.
        """
        told = self._told_np
        if told is None or len(told) != num_rows:
            told = self._told_np = self.told.numpy()[:num_rows].reshape(-1, 1)
        tokens = told.astype(np.int32)
        return None if _NO_TOKEN in tokens.tobytes() else tokens

    def of_rows(self, req_idx_np: NDArray[np.int32], wanting: tuple[NDArray[np.int64], int] | None) -> SampleResult:
        """The part of the first rows of a captured step, once it is on the host; behind them stands padding.

        wanting  (rows with logprobs, how many of the best they want at most), None for no logprobs
        """
        n = len(req_idx_np)
        own = SampleResult(self.ids, self.told[:n], self.top, self.chosen, req_idx_np)  # others are read by row alone
        if wanting is not None:
            assert self.logprobs is not None, "the step was to tell logprobs"
            own.logprobs = self.logprobs.at(*wanting)
        return own


def union_of(bits: NDArray[np.uint64]) -> int:
    """All bits of the rows."""
    # rows of a step share few patterns: a set of them costs less than a reduction over as few numbers
    union = 0
    for pattern in set(bits.tolist()):
        union |= pattern
    return union
