"""Masks of a step's logits rows, for requests that have a grammar. What a mask allows is the constraint's part.

The scheduler calls this once a step has been decided, and only while such requests are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from framework.batch import GrammarRows

if TYPE_CHECKING:
    from framework.scheduler.ledger import StepRecord


def grammar_rows(step: StepRecord) -> GrammarRows | None:
    """Masks of all logits rows of requests with a constraint; None when the step draws nothing for any of them.

    A request has a logits row behind each of its draft tokens and one before them.
    """
    scheduled, row = step.scheduled, 0
    spans = []
    for request, draws, num_drafts in zip(
        step.requests, scheduled.samples.tolist(), scheduled.num_drafts.tolist(), strict=True
    ):
        count = (1 + num_drafts) * draws
        if count and request.constraint is not None:
            spans.append((request.constraint, row, count))
        row += count
    if not spans:
        return None
    logits_rows = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in spans])
    bits = np.empty((len(logits_rows), spans[0][0].num_words), np.int32)
    at = 0
    for constraint, _, count in spans:
        constraint.fill(bits[at : at + count])
        at += count
    return GrammarRows(logits_rows, bits)
