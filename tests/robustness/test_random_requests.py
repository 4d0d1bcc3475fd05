"""Random prompts, parameters, aborts and steps, right and wrong: a named error or tokens, and every block comes back.

Nothing but ValueError and TypeError leaves `add_request`, nothing at all leaves `step` and `abort`, and a bound on the
steps stands for a clock. After each history the engine gives a request the tokens that it gives it alone.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted

from .strategies import VOCAB, parameters, prompts

NUM_OPERATIONS, MAX_STEPS = 10, 3000
BUDGETS = [pytest.param(12, id="quick"), pytest.param(700, id="full", marks=pytest.mark.full)]
"""Histories an engine; three engines, about seven requests a history: 250 requests, or 10,000."""
SMALL = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4"]
ENGINES = {
    "plain": ["kv_cache.num_blocks=20", "engine.async_scheduling=false"],
    "ahead": ["kv_cache.num_blocks=20", "engine.async_scheduling=true", "scheduler.max_num_batched_tokens=7"],
    "tight": ["kv_cache.num_blocks=6", "kv_cache.block_size=4", "scheduler.preemption=swap", "kv_connector=memory",
              "policy=priority"],
}  # fmt: skip
PROBE = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Greedy goes from t to t + 1 by a margin of 3, so that draws wander; eos is 3."""
    table = torch.eye(VOCAB).roll(1, 1) * 3
    folder = save_crafted(tmp_path_factory.mktemp("random") / "model", table, eos_token_id=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def llm(folder, request):
    with LLM(str(folder), overrides=[*SMALL, *ENGINES[request.param]]) as llm:
        yield llm


add = st.tuples(st.just("add"), prompts, parameters())
histories = st.lists(
    st.one_of(add, add, st.tuples(st.just("abort"), st.integers(0, 9)), st.tuples(st.just("step"), st.integers(1, 6))),
    min_size=NUM_OPERATIONS,
    max_size=2 * NUM_OPERATIONS,
)


def bounded(max_examples):
    return settings(
        max_examples=max_examples, deadline=None, derandomize=max_examples <= 12, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.parametrize("count", BUDGETS)
def test_any_history_ends_with_every_block_returned_and_errors_are_named(llm, count):
    @bounded(count)
    @given(histories)
    def search(history):
        ended = play(llm.engine, history)
        errors = [output.error for output in ended if output.error is not None]
        assert all("together mask the whole vocabulary" in error for error in errors), errors
        assert_usable(llm)

    search()


def play(engine, history):
    """The last outputs of the requests of a history that were admitted; nothing of a history that fails is left."""
    names = []
    try:
        return [output for output in outputs_of(engine, history, names) if output.finished]
    finally:
        for name in names:
            engine.abort(name)


def outputs_of(engine, history, names):
    outputs = []
    for operation, *what in history:
        if operation == "add":
            names.append(f"r{len(names)}")
            admit(engine, names[-1], *what)
        elif operation == "abort":
            last = engine.abort(f"r{what[0]}")
            outputs += [] if last is None else [last]
        else:
            for _ in range(what[0]):
                outputs += engine.step()
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            break
        outputs += engine.step()
    assert not engine.has_unfinished_requests(), f"still running after {MAX_STEPS} steps"
    return outputs


def admit(engine, name, prompt, given_params):
    before = engine.stats()
    try:
        engine.add_request(name, prompt, SamplingParams(**given_params))
    except (ValueError, TypeError) as error:
        text = str(error)
        assert "\n" not in text and len(text) < 600, text
        assert any(word in text for word in (*map(str, given_params), "prompt", "tokens", "priority", "lora", "salt"))
        assert engine.stats() == before


def assert_usable(llm):
    stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1, stats
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0), stats
    (probe,) = llm.generate([4], PROBE, use_tqdm=False)
    assert probe.outputs[0].token_ids == [5, 6, 7, 8, 9]
