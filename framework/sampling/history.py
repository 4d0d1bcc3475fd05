"""Array functions over the tokens before a logits row, and over what a step added to them.

Stages that look back call them with `StageContext.token_ids`; drafts before a row are part of its history, so that
nothing here treats a draft row as a special case. Pure functions of tensors that know no pipeline and wait for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from framework.batch import Rows

NO_TOKEN = -1
"""What stands where a row has no token: equal to no id."""


def tokens_before(token_ids: Tensor, rows: Rows, distance: Tensor, first: Tensor | None = None) -> Tensor:
    """[L, n] int32 tokens that stand `distance` places before the one that each row draws, NO_TOKEN where none does.

    token_ids  [num_rows, max_model_len] int32 of `StageContext`
    distance   [n] or [L, n] int64; 1 is the last token. Below 1 there is none
    first      [L] int64 place of the first token that counts (the number of prompt tokens: outputs alone); None: 0
    """
    place = rows.position.unsqueeze(1) - distance
    start = 0 if first is None else first.unsqueeze(1)
    is_there = (place >= start) & (distance > 0)
    known = token_ids[rows.req_idx.unsqueeze(1), place.clamp(0, token_ids.shape[1] - 1)]
    return torch.where(is_there, known, NO_TOKEN)


def last_tokens(token_ids: Tensor, rows: Rows, n: int, first: Tensor | None = None) -> Tensor:
    """[L, n] int32 the n tokens before the one that each row draws, the nearest first; see `tokens_before`."""
    return tokens_before(token_ids, rows, torch.arange(1, n + 1, device=rows.position.device), first)


def drafts_before(token_ids: Tensor, rows: Rows) -> Tensor:
    """[L, k] int32 the draft tokens before each row, which no commit has counted yet; NO_TOKEN in unused places."""
    first = rows.position - rows.offset
    return last_tokens(token_ids, rows, rows.drafts.shape[1], first)


def taken(rows: Rows, sampled: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
    """(token [L] int64 that each logits row gave in the step, whether it was taken [L] bool), for a stage's `commit`.

    sampled [R, k + 1], num_valid [R]: token j of a request comes from its logits row with j drafts before it.
    """
    batch_row = (rows.offset == 0).cumsum(0) - 1
    offset = rows.offset.long()
    return sampled[batch_row, offset].long(), offset < num_valid[batch_row]


def ngram_ends(tokens: Tensor, length: Tensor, size: Tensor, longest: int) -> Tensor:
    """[L, W] bool: whether the token at a place follows the same size - 1 tokens as the one that would come next.

    tokens   [L, W] ids of each row, of which the first `length` [L] are there
    size     [L] ids in an n-gram, the one that follows included; 0 finds nothing
    longest  at least the largest size
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    ends = (place >= size.unsqueeze(1) - 1) & (place < length.unsqueeze(1)) & (size > 0).unsqueeze(1)
    for back in range(1, min(longest, tokens.shape[1])):
        last = tokens.gather(1, (length - back).clamp(min=0).unsqueeze(1))
        ends[:, back:] &= (tokens[:, :-back] == last) | (size <= back).unsqueeze(1)
    return ends
