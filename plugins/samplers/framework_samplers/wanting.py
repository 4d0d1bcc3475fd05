"""In-place stages that run for the rows which want them, and for no others of the step.

For those whose work is too much to be done for every row with neutral values, and that read on the host which rows want
them anyway. Called by such stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Rows


def apply_where(
    is_wanting: NDArray[np.bool_], logits: Tensor, rows: Rows, apply: Callable[[Tensor, Rows], None]
) -> None:
    """apply(logits, rows) in place for the logits rows that want it; is_wanting [L]. Not at all where none does."""
    places = np.flatnonzero(is_wanting)
    if len(places) == len(logits):
        apply(logits, rows)
    elif len(places):
        index = torch.from_numpy(places).to(logits.device, non_blocking=True)
        part = logits.index_select(0, index)
        apply(part, rows.at(index, places))
        logits.index_copy_(0, index, part)
