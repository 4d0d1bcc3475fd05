"""Tokens before a logits row, and what a step gave, by small tables; drafts stand where they will be."""

import numpy as np
import torch

from framework.batch import Rows
from framework.sampling.history import drafts_before, last_tokens, ngram_ends, taken, tokens_before

TABLE = torch.tensor([[0] * 8, [10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27]], dtype=torch.int32)


def rows(req_idx, position, offset=None, num_drafts=0):
    count = len(req_idx)
    return Rows(
        req_idx=torch.tensor(req_idx),
        offset=torch.tensor(offset or [0] * count, dtype=torch.int32),
        position=torch.tensor(position),
        seed=torch.zeros(count, dtype=torch.int64),
        drafts=torch.zeros(count, num_drafts, dtype=torch.int64),
        num_drafts=torch.zeros(count, dtype=torch.int32),
        req_idx_np=np.array(req_idx, np.int32),
    )


def test_last_tokens_come_nearest_first_and_end_where_the_sequence_begins():
    assert last_tokens(TABLE, rows([1, 2], [4, 1]), 3).tolist() == [[13, 12, 11], [20, -1, -1]]


def test_tokens_before_the_first_one_that_counts_are_none():
    assert last_tokens(TABLE, rows([1, 2], [4, 3]), 3, torch.tensor([2, 3])).tolist() == [[13, 12, -1], [-1] * 3]


def test_last_place_of_a_full_row_is_read_and_none_behind_it():
    assert last_tokens(TABLE, rows([1], [8]), 2).tolist() == [[17, 16]]
    assert tokens_before(TABLE, rows([1], [8]), torch.tensor([[1, 0, -1, 9]])).tolist() == [[17, -1, -1, -1]]


def test_drafts_before_a_row_are_those_of_its_own_request():
    step = rows([1, 1, 1, 2], [3, 4, 5, 6], [0, 1, 2, 0], num_drafts=2)
    assert drafts_before(TABLE, step).tolist() == [[-1, -1], [13, -1], [14, 13], [-1, -1]]
    assert drafts_before(TABLE, rows([1], [3])).shape == (1, 0)


def test_taken_tells_each_logits_row_its_token_and_whether_it_counts():
    step = rows([1, 1, 1, 2, 3, 3], [3, 4, 5, 6, 2, 3], [0, 1, 2, 0, 0, 1], num_drafts=2)
    tokens, counts = taken(step, torch.tensor([[5, 6, 0], [7, 0, 0], [8, 9, 0]]), torch.tensor([2, 1, 0]))
    assert tokens.tolist() == [5, 6, 0, 7, 8, 9]
    assert counts.tolist() == [True, True, False, True, False, False]


def test_ngram_ends_are_the_followers_of_what_stands_last():
    tokens = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 9, 9]] * 4)
    ends = ngram_ends(tokens, torch.tensor([8, 8, 8, 2]), torch.tensor([3, 1, 0, 3]), 3)
    found = [row.nonzero().squeeze(1).tolist() for row in ends]
    assert found == [[2, 5], list(range(8)), [], []]
