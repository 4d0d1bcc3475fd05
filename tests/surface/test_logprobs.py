"""Raw logprobs: log-softmax of the model's own logits, whatever the pipeline does (CASES C7 for this mode)."""

import pytest
import torch

from framework import LLM, Logprob, SamplingParams
from framework.testing.crafted import save_crafted

VOCAB = 24


@pytest.fixture(scope="module")
def exact():
    """[V, V] the logprobs that the model `mixed` has, in float64."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    return table.double().log_softmax(-1)


SHAPES = [{"temperature": 0}, {"temperature": 0.5, "top_k": 2}, {"temperature": 2.0}, {"top_p": 0.3, "min_p": 0.1}]


@pytest.mark.parametrize("k", [0, 1, 2, 5, VOCAB])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_are_the_k_best_and_the_sampled_token_with_true_values_and_ranks(mixed, exact, k, shape):
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=k, **shape)
    (output,) = mixed.generate([4], params)
    got = output.outputs[0]
    assert len(got.logprobs) == len(got.token_ids) == 12
    for before, token, entry in zip([4, *got.token_ids], got.token_ids, got.logprobs, strict=False):
        row = exact[before]
        order = row.argsort(descending=True).tolist()
        assert set(entry) == {token, *order[:k]}
        for i, found in entry.items():
            assert found.logprob == pytest.approx(row[i].item(), abs=2e-5)
            assert found.rank == order.index(i) + 1
            assert found.decoded_token == {1: "<s>", 3: "</s>"}.get(i, f"w{i}")
    total = sum(e[t].logprob for t, e in zip(got.token_ids, got.logprobs, strict=True))
    assert got.cumulative_logprob == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("asked", [VOCAB, -1])
def test_whole_vocabulary_sums_to_one(mixed, asked):
    (output,) = mixed.generate([4], SamplingParams(temperature=0.3, top_k=3, logprobs=asked, max_tokens=3))
    for entry in output.outputs[0].logprobs:
        assert len(entry) == VOCAB
        assert sum(torch.tensor(e.logprob).exp().item() for e in entry.values()) == pytest.approx(1, abs=1e-5)


def test_no_logprobs_give_none(mixed):
    completion = mixed.generate([4], SamplingParams(max_tokens=2))[0].outputs[0]
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_value_behaves_as_a_list_of_dicts(mixed):
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    found = mixed.generate([4], asked)[0].outputs[0].logprobs
    assert len(found) == 4 and len(found[1:3]) == 2 and list(found)[-1] == found[-1]
    assert found == list(found) and found[0] != found[1]
    assert all(isinstance(value, Logprob) for value in found[0].values())
    with pytest.raises(IndexError):
        found[4]


def test_rows_of_one_batch_keep_their_own_numbers(mixed):
    params = [SamplingParams(seed=1, max_tokens=n, ignore_eos=True, logprobs=k, temperature=t)
              for n, k, t in [(3, None, 1.0), (9, 4, 1.0), (5, 0, 0.0), (7, 2, 2.0)]]  # fmt: skip
    prompts = [[4], [5] * 20, [6], [7, 8]]
    together = [o.outputs[0] for o in mixed.generate(prompts, params)]
    alone = [mixed.generate([p], s)[0].outputs[0] for p, s in zip(prompts, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None:
            assert [list(e) for e in one.logprobs] == [list(e) for e in other.logprobs]
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-5)


def test_equal_logits_share_a_rank(tmp_path):
    table = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]] * 6)
    with LLM(save_crafted(tmp_path / "ties", table), overrides=["engine.dtype=float32"]) as llm:
        (entry,) = llm.generate([0], SamplingParams(temperature=0, max_tokens=1, logprobs=6))[0].outputs[0].logprobs
    assert {i: e.rank for i, e in entry.items()} == {1: 1, 2: 1, 4: 1, 0: 4, 5: 4, 3: 6}


def test_repr_is_short_whatever_the_vocabulary(mixed):
    asked = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=-1)
    (output,) = mixed.generate([4], asked)
    found = output.outputs[0].logprobs
    assert repr(found).startswith("TokenLogprobs(9 entries: [{") and repr(found).endswith(", ...}, ...])")
    assert len(repr(found)) < 1000 and repr(next(iter(found[0].values()))) in repr(found)


def test_repr_of_few_entries_is_whole(mixed):
    asked = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=0)
    (output,) = mixed.generate([[4, 5]], asked)
    assert repr(output.outputs[0].logprobs) == f"TokenLogprobs(2 entries: {list(output.outputs[0].logprobs)})"
    assert repr(output.prompt_logprobs) == f"TokenLogprobs(2 entries: {list(output.prompt_logprobs)})"
