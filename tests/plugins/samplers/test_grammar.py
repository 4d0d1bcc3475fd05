"""Stage `grammar`: packed masks on logits rows, each on its own and on no other."""

from dataclasses import replace

import pytest
import torch
from transformers import PrefixConstrainedLogitsProcessor

from framework import SamplingParams
from framework.batch import AllowedTokens
from framework.structured.vocabulary import bits_of
from framework.testing.stages import CHECKS, StageCase, context, make_rows
from framework_samplers.grammar import GrammarMask

VOCAB = 40
ASKS = SamplingParams(structured_outputs={"regex": "a"})


@pytest.fixture
def stage():
    return GrammarMask({}, context(GrammarMask.spec, VOCAB))


def masks(*allowed):
    return torch.stack([torch.from_numpy(bits_of(ids, VOCAB)) for ids in allowed])


def applied(stage, logits, allowed):
    out = logits.clone()
    stage.apply(out, replace(make_rows(range(1, len(logits) + 1)), allowed=allowed))
    return out


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_logits_equal_those_of_transformers(stage, random_logits):
    logits, ids = random_logits(1, VOCAB), [0, 7, 8, 31, 32, 39]
    oracle = PrefixConstrainedLogitsProcessor(lambda batch, text: ids, num_beams=1)
    got = applied(stage, logits, AllowedTokens(None, masks(ids)))
    assert same(got, oracle(torch.zeros(1, 3, dtype=torch.int64), logits.clone()))


def test_mask_of_all_ones_changes_no_bit(stage, random_logits):
    logits = random_logits(2, VOCAB)
    logits[0, 3], logits[1, 5] = float("inf"), -0.0
    assert same(applied(stage, logits, AllowedTokens(None, masks(range(VOCAB), range(VOCAB)))), logits)


def test_case_c6_each_row_has_its_own_mask_and_free_rows_keep_every_bit(stage, random_logits):
    logits = random_logits(4, VOCAB)
    logits[0, 2] = float("nan")
    for rows in ([1, 3], [3, 0], [2], [0, 1, 2, 3]):
        own = [[row, 39] for row in rows]
        out = applied(stage, logits, AllowedTokens(torch.tensor(rows), masks(*own)))
        for row in range(4):
            if row in rows:
                assert out[row].isfinite().nonzero().flatten().tolist() == [i for i in (row, 39) if (row, i) != (0, 2)]
                assert same(out[row, [39]], logits[row, [39]])
            else:
                assert same(out[row], logits[row])


def test_case_c6_rows_of_trimmed_drafts_do_not_shift_the_masks_of_the_next_request(stage, random_logits):
    # four drafts were scheduled and two are valid: rows 0 to 2 are those of the first request, row 3 is the second's
    logits = random_logits(4, VOCAB)
    out = applied(stage, logits, AllowedTokens(torch.tensor([3]), masks([8])))
    assert same(out[:3], logits[:3]) and out[3].isfinite().nonzero().flatten().tolist() == [8]


def test_step_without_masks_changes_no_bit(stage, random_logits):
    logits = random_logits(2, VOCAB)
    assert same(applied(stage, logits, None), logits)


def test_request_without_a_constraint_does_not_want_the_stage(stage):
    assert stage.wants(ASKS) and not stage.wants(SamplingParams())
    stage.validate(ASKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    check(StageCase(GrammarMask, (ASKS, SamplingParams(structured_outputs={"choice": ["b"]}))))
