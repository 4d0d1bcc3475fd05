"""Steps that no request asks for, so that what steps with prompts compile is there when the first request comes.

Their rows have no request yet: block tables are empty, so that keys land in the null block, and a request that gets
such a row later overwrites it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from framework.batch import NO_BLOCKS, NULL_ROW, SchedulerOutput

_SHORT = 33
"""Tokens of a prompt that takes more than one tile of any kernel, and fills none."""


def prompt_steps(
    num_rows: int, max_num_batched_tokens: int, max_model_len: int, num_groups: int
) -> Iterator[SchedulerOutput]:
    """One prompt as long as a step may be, a decode beside a shorter prompt, and a few tokens alone.

    num_rows is the request table's, the null row among them.
    """
    longest = min(max_num_batched_tokens, max_model_len - 1)
    short = min(_SHORT, longest - 1, max_model_len // 2)
    first = NULL_ROW + 1
    if longest < 1:
        return
    yield _step([(first, longest, 0)], num_groups)
    if num_rows > first + 1 and short > 0:
        yield _step([(first, 1, longest), (first + 1, short, 0)], num_groups)
        yield _step([(first + 1, min(3, short), short)], num_groups)


def _step(spans: Sequence[tuple[int, int, int]], num_groups: int) -> SchedulerOutput:
    """spans: [(req_idx, tokens to compute, tokens before them)]; every row samples."""
    rows, scheduled, computed = (np.array(column, np.int32) for column in zip(*spans, strict=True))
    return SchedulerOutput(
        step_id=0,
        rows=rows,
        num_scheduled_tokens=scheduled,
        num_computed_tokens=computed,
        samples=np.ones(len(rows), np.bool_),
        num_drafts=np.zeros(len(rows), np.int32),
        new_block_ids=(NO_BLOCKS,) * num_groups,
        num_prompt_tokens=int(scheduled.sum()),
    )
