"""Steps that run before any request: inside of the table and its lengths, whatever the sizes, and without a trace."""

import pytest
import torch

from framework import LLM, SamplingParams
from framework.batch import NULL_ROW
from framework.testing.crafted import save_crafted
from framework.worker.warm_steps import prompt_steps


@pytest.mark.parametrize("num_rows", [2, 3, 9])
@pytest.mark.parametrize("tokens", [1, 2, 8, 512])
@pytest.mark.parametrize("length", [1, 2, 3, 40, 4096])
def test_every_span_lies_in_the_table_behind_the_one_before_it(num_rows, tokens, length):
    ends = {}
    for step in prompt_steps(num_rows, tokens, length, 2):
        assert 1 <= step.num_tokens <= tokens and len(step.new_block_ids) == 2
        assert NULL_ROW not in step.rows and max(step.rows) < num_rows
        for row, count, start in zip(step.rows, step.num_scheduled_tokens, step.num_computed_tokens, strict=True):
            assert start == ends.get(row, 0) and count >= 1
            ends[row] = start + count
    assert max(ends.values(), default=0) <= length


def test_long_steps_have_a_whole_prompt_a_decode_beside_one_and_few_tokens():
    kinds = [step.num_scheduled_tokens.tolist() for step in prompt_steps(9, 512, 4096, 1)]
    assert kinds == [[512], [1, 33], [3]]


def test_requests_behind_them_get_the_tokens_of_a_fresh_engine(tmp_path, monkeypatch):
    folder = save_crafted(tmp_path / "mixed", torch.randn(24, 24, generator=torch.Generator().manual_seed(2)))
    words = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=2", "engine.seed=1"]
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=4, presence_penalty=0.5, logprobs=2)
    ran = []

    def warm(runner):
        ran.extend(runner.execute(step).result() for step in runner.prompt_steps())
        return {}

    def served():
        with LLM(folder, overrides=words) as llm:
            outputs = llm.generate([[3], [4, 5]], params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    expected = served()
    monkeypatch.setattr("framework.engine.build.warm_up", warm)
    assert served() == expected
    assert [len(output.sampled) for output in ran] == [1, 2, 1]


def test_connectors_hear_of_none_of_them(tmp_path, monkeypatch):
    class Refuses:
        def __getattr__(self, name):
            raise AssertionError(f"{name} is asked for")

    def warm(runner):
        former = runner._connector
        runner._connector = runner._results.connector = Refuses()
        with runner.unheard():
            for step in runner.prompt_steps():
                runner.execute(step).result()
        assert isinstance(runner._connector, Refuses)
        runner._connector = runner._results.connector = former
        return {}

    folder = save_crafted(tmp_path / "plain", torch.zeros(8, 8))
    monkeypatch.setattr("framework.engine.build.warm_up", warm)
    with LLM(folder, overrides=["engine.dtype=float32", "engine.max_model_len=64"]) as llm:
        assert len(llm.generate([[3]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
