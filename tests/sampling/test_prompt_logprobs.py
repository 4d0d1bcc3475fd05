"""Which positions of a prompt are measured, and in how many slices, whatever chunks it comes in."""

import numpy as np
import pytest
import torch

from framework import SamplingParams
from framework.batch import NewRequest, SchedulerOutput
from framework.sampling import prompt_logprobs
from framework.sampling.prompt_logprobs import PromptLogprobs

VOCAB = 6
PROMPT = [1, 4, 2, 5, 3]
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))


class Counted:
    """Logits of hidden states that are token ids, by a table."""

    def __init__(self):
        self.slices = []

    def __call__(self, hidden):
        self.slices.append(len(hidden))
        return TABLE[hidden.squeeze(1)]


def new(num_outputs=0):
    ids = np.array([*PROMPT, *[0] * num_outputs], np.int32)
    return NewRequest(1, "a", ids, len(PROMPT), 0, SamplingParams(prompt_logprobs=2), 0)


def step(start, count):
    return SchedulerOutput(0, *(np.array([n], np.int32) for n in (1, count, start)), np.array([True]), np.zeros(1))


def measured(prompts, start, count):
    scheduled = step(start, count)
    spans = prompts.spans(scheduled)
    hidden = torch.tensor(PROMPT[start : start + count]).unsqueeze(1)
    return prompts.collect(spans, prompts.compute(hidden, spans))


@pytest.mark.parametrize("chunks", [[5], [2, 3], [4, 1], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_each_token_but_the_first_is_told_once_with_the_last_chunk(chunks, rows_at_once, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * VOCAB * rows_at_once)
    compute = Counted()
    prompts = PromptLogprobs(compute, VOCAB, is_log=True)
    prompts.add(new())
    starts = np.cumsum([0, *chunks[:-1]]).tolist()
    *before, told = [measured(prompts, start, count) for start, count in zip(starts, chunks, strict=True)]
    assert before == [{}] * (len(chunks) - 1)
    logprobs = TABLE.log_softmax(-1)[PROMPT[:-1]]
    np.testing.assert_allclose(told[0].sampled, logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], atol=1e-6)
    np.testing.assert_array_equal(told[0].top_ids, logprobs.topk(2).indices)
    assert sum(compute.slices) == 4 and max(compute.slices) <= rows_at_once
    assert prompts.spans(step(5, 1)) == []


def test_request_that_comes_back_with_tokens_has_told_its_prompt():
    prompts = PromptLogprobs(Counted(), VOCAB, is_log=True)
    prompts.add(new(num_outputs=2))
    assert prompts.spans(step(0, 7)) == []


def test_row_that_was_released_tells_nothing():
    prompts = PromptLogprobs(Counted(), VOCAB, is_log=True)
    prompts.add(new())
    prompts.release(1)
    assert prompts.spans(step(0, 5)) == []
