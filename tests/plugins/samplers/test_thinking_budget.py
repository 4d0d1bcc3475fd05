"""thinking_budget allows nothing but the end of thinking once so many tokens stand behind its start."""

import pytest
import torch

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted
from framework.testing.stages import CHECKS, StageCase, context, make_rows, new_request
from framework_samplers.options import ThinkingBudgetConfig
from framework_samplers.thinking_budget import ThinkingBudget

VOCAB, START, END = 12, 10, 11


def params(budget, **given):
    return SamplingParams(extra_args={"thinking_budget": {"max_tokens": budget}}, **given)


def allowed(budget, text, *, start=START, end=END):
    """Ids that a request with this text so far may draw."""
    ctx = context(ThinkingBudget.spec, VOCAB, 2)
    stage, one = ThinkingBudget(ThinkingBudgetConfig(start, end), ctx), params(budget, max_tokens=50)
    stage.validate(one)
    stage.add_request(1, one, new_request(1, one))
    ctx.token_ids[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    ctx.token_ids[1, len(text) :] = END
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    out = logits.clone()
    stage.apply(out, make_rows([1], positions=[len(text)]))
    kept = out.isfinite()
    assert torch.equal(out[kept], logits[kept])
    return kept[0].nonzero().squeeze(1).tolist()


ALL = list(range(VOCAB))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stage_keeps_its_contract(check):
    """The kit's prompt is 1 2 3 and its outputs are small ids, so that thinking begins and ends in them."""
    check(StageCase(ThinkingBudget, (params(0), params(2), params(4)), options=ThinkingBudgetConfig(2, [5, 6])))


@pytest.mark.parametrize("text", [[1, START], [1, START, 5], [START, 5, 5], [1, 2, 3], [1]])
def test_within_the_budget_or_without_a_start_every_token_is_allowed(text):
    assert allowed(3, text) == ALL


@pytest.mark.parametrize("text", [[START, 5, 5, 5], [1, START, 5, 5, 5, 5], [START, END, 1, START, 2, 2, 2]])
def test_at_the_budget_only_the_end_is_allowed(text):
    assert allowed(3, text) == [END]


def test_a_budget_of_nothing_ends_thinking_at_once():
    assert allowed(0, [1, START]) == [END]


@pytest.mark.parametrize("text", [[START, 5, 5, 5, 5, END], [START, 5, END, 6, 6, 6, 6], [END, START, END, 1, 1, 1]])
def test_a_request_past_its_thinking_is_left_alone(text):
    assert allowed(3, text) == ALL


def test_a_start_of_several_tokens_is_found_whole():
    assert allowed(1, [9, 10, 5], start=[9, 10]) == [END]
    assert allowed(1, [9, 5, 10, 5], start=[9, 10]) == ALL


def test_an_end_of_several_tokens_is_gone_through_one_by_one():
    end = [7, 8, 7, 9]
    assert allowed(2, [START, 5, 5], end=end) == [7]
    assert allowed(2, [START, 5, 5, 7], end=end) == [8]
    assert allowed(2, [START, 5, 5, 7, 8], end=end) == [7]
    assert allowed(2, [START, 5, 5, 7, 8, 7], end=end) == [9]
    assert allowed(2, [START, 5, 5, 7, 8, 7, 8], end=end) == [7]
    assert allowed(2, [START, 5, 5, 7, 8, 7, 9], end=end) == ALL
    assert allowed(0, [7, START], start=START, end=[7, 8]) == [7]  # the 7 before the start ends nothing


def test_tokens_of_the_start_are_no_part_of_the_end():
    assert allowed(0, [1, 9, 7], start=[9, 7], end=[7, 8]) == [7]


def test_words_are_encoded_by_the_tokenizer():
    ctx = context(ThinkingBudget.spec, VOCAB, 2, encode={"<think>": [START], "</think>": [END]}.__getitem__)
    stage = ThinkingBudget(ThinkingBudgetConfig(), ctx)
    stage.validate(params(1))
    assert (stage._start.tolist(), stage._end.tolist()) == ([START], [END])


def test_without_a_tokenizer_and_without_ids_a_request_is_refused():
    stage = ThinkingBudget(ThinkingBudgetConfig(), context(ThinkingBudget.spec, VOCAB, 2))
    stage.validate(SamplingParams())
    with pytest.raises(ValueError, match=r"no tokenizer .* give token ids by sampler\.stages\.thinking_budget\.start"):
        stage.validate(params(1))


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
def test_a_budget_outside_of_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"\.thinking_budget\.max_tokens must be (at least 0|an integer), got"):
        allowed(value, [1])


def test_a_request_stops_thinking_and_goes_on(tmp_path):
    table = 9.0 * torch.eye(VOCAB).roll(1, dims=1)  # after token t comes t + 1, and after the last one 0
    table[5] = 9.0 * torch.eye(VOCAB)[5]  # thinks 5 for ever
    words = [
        "+sampler/stage=thinking_budget",
        "sampler.stages.thinking_budget.start=3",
        "sampler.stages.thinking_budget.end=11",
    ]
    greedy = {"temperature": 0.0, "max_tokens": 8}
    with LLM(str(save_crafted(tmp_path, table)), overrides=words) as llm:
        free, bound = llm.generate([[2], [2]], [SamplingParams(**greedy), params(4, **greedy)])
    assert free.outputs[0].token_ids == [3, 4, 5, 5, 5, 5, 5, 5]
    assert bound.outputs[0].token_ids == [3, 4, 5, 5, 5, 11, 0, 1]
