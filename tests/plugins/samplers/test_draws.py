"""What users see of stages that draw or cut: first tokens of many seeds against the exact law, through a checkpoint."""

import pytest
import torch
from scipy import stats

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted

PROBS = torch.tensor([0.3, 0.25, 0.2, 0.12, 0.08, 0.05], dtype=torch.float64)
COUNT = 10 * 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = PROBS.log().float().expand(6, -1)
    return str(save_crafted(tmp_path_factory.mktemp("draws"), table.contiguous()))


@pytest.fixture(scope="module")
def full(folder):
    with LLM(folder, overrides=["sampler=full", "engine.dtype=float32", "scheduler.max_num_seqs=256"]) as llm:
        yield llm


def among(*ids):
    """The law of a draw from these tokens."""
    kept = torch.zeros_like(PROBS)
    kept[list(ids)] = PROBS[list(ids)]
    return kept / kept.sum()


def drawn(llm, **given):
    """[6] how often each token comes first."""
    asked = [SamplingParams(n=128, seed=seed, max_tokens=1, **given) for seed in range(COUNT // 128)]
    outs = llm.generate([[0]] * len(asked), asked)
    return torch.bincount(torch.tensor([c.token_ids[0] for out in outs for c in out.outputs]), minlength=6)


def assert_follows(counts, law):
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0].numpy(), (law[law > 0] * COUNT).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("stage", "given", "law"),
    [
        ("xtc", {"threshold": 0.11, "probability": 1.0}, among(3, 4, 5)),
        ("xtc", {"threshold": 0.18, "probability": 0.4}, 0.6 * PROBS + 0.4 * among(2, 3, 4, 5)),
        # The entropy is 1.633 nats: 0.2 is 0.02 away from it, 0.25 is 0.25, 0.3 is 0.43 and 0.12 is 0.49.
        ("typical", {"mass": 0.7}, among(0, 1, 2)),
        ("typical", {"mass": 0.4}, among(1, 2)),
        ("epsilon", {"epsilon": 0.1}, among(0, 1, 2, 3)),
        ("eta", {"epsilon": 0.2}, among(0, 1, 2, 3)),  # sqrt(0.2) * exp(-1.633) is 0.087
        ("top_n_sigma", {"n": 1.0}, among(0, 1, 2)),  # sigma is 0.644, and ln(0.3 / 0.2) 0.405, ln(0.3 / 0.12) 0.916
    ],
)
def test_first_tokens_follow_the_law(full, stage, given, law):
    assert_follows(drawn(full, extra_args={stage: given}), law)


def test_dynamic_temperature_follows_the_law(full):
    entropy = -float((PROBS * PROBS.log()).sum())
    temperature = 0.2 + 1.6 * entropy / float(torch.tensor(6.0).log())
    law = (PROBS.log() / temperature).softmax(0)
    assert_follows(drawn(full, extra_args={"dynamic_temperature": {"low": 0.2, "high": 1.8}}), law)


def test_first_tokens_of_mirostat_follow_the_law(folder):
    with LLM(folder, overrides=["sampler=mirostat", "engine.dtype=float32", "scheduler.max_num_seqs=256"]) as llm:
        counts = drawn(llm, extra_args={"mirostat": {"tau": 1.25}})  # mu is 2.5 bits: p of 0.177 and more
    assert_follows(counts, among(0, 1, 2))
