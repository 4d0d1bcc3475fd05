"""Prompt logprobs of tiny random models against transformers, for every size of chunk."""

import pytest
import torch

from framework import LLM, SamplingParams

from .tiny import SAVE, prompts

TOP = 4


@pytest.fixture(scope="module", params=SAVE)
def folder(request, tmp_path_factory):
    return SAVE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(folder):
    """(prompt, [P - 1, V] logprobs of what follows each of its tokens but the last) of each prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [(p, model(torch.tensor([p])).logits[0, :-1].log_softmax(-1)) for p in prompts(9)]


@pytest.mark.parametrize("budget", [7, 32, 512])
def test_values_and_ranks_equal_those_of_transformers(folder, expected, budget):
    words = ["engine.dtype=float32", "engine.max_model_len=128", f"scheduler.max_num_batched_tokens={budget}",
             "kv_cache.num_blocks=64"]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=TOP)
    with LLM(str(folder), overrides=words) as llm:
        for _ in range(2):  # what the first round leaves in the prefix cache is not used
            outputs = llm.generate([p for p, _ in expected], params, use_tqdm=False)
            for (prompt, rows), output in zip(expected, outputs, strict=True):
                assert output.num_cached_tokens == 0 and output.prompt_logprobs[0] is None
                for token, row, entry in zip(prompt[1:], rows, output.prompt_logprobs[1:], strict=True):
                    assert len(entry) in (TOP, TOP + 1) and token in entry
                    for i, found in entry.items():
                        assert found.logprob == pytest.approx(row[i].item(), abs=1e-4)
                    best = sorted(entry.values(), key=lambda e: e.rank)[:TOP]
                    assert torch.allclose(torch.tensor([e.logprob for e in best]), row.topk(TOP).values, atol=1e-4)
