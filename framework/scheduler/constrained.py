"""Masks of a step's logits rows, for requests that have a grammar. What a mask allows is the constraint's part.

The scheduler calls this once a step has been decided, and only while such requests are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from framework.batch import GrammarRows

if TYPE_CHECKING:
    from framework.request import Request
    from framework.scheduler.ledger import StepRecord

_NO_DRAFTS: Mapping[Request, Sequence[int]] = {}


def grammar_rows(step: StepRecord, drafts: Mapping[Request, Sequence[int]] = _NO_DRAFTS) -> GrammarRows | None:
    """Masks of all logits rows of requests with a constraint; None when the step draws nothing for any of them.

    drafts  tokens that the step tries, of the requests with `num_drafts` of them: a request has a logits row behind
            each, and one before them
    """
    scheduled, spans, end = step.scheduled, [], 0
    columns = zip(step.requests, scheduled.samples.tolist(), scheduled.num_drafts.tolist(), strict=True)
    for request, draws, num_drafts in columns:
        first, end = end, end + (1 + num_drafts) * draws
        if first < end and request.constraint is not None:
            spans.append((request.constraint, drafts.get(request, ()), range(first, end)))
    if not spans:
        return None
    logits_rows = np.array([row for _, _, rows in spans for row in rows], np.int32)
    bits = np.empty((len(logits_rows), spans[0][0].num_words), np.int32)
    at = 0
    for constraint, tokens, rows in spans:
        constraint.fill(bits[at : at + len(rows)], tokens)
        at += len(rows)
    return GrammarRows(logits_rows, bits)
