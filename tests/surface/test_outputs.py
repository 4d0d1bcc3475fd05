"""What comes back: fields, metrics, cached tokens, streams of the engine, errors of single requests."""

import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import LLM, CompletionOutput, RequestOutput, SamplingParams
from framework.testing.crafted import save_crafted

GREEDY = SamplingParams(temperature=0, max_tokens=5)
WORDS = ("engine.dtype=float32", "engine.max_model_len=128")


def test_output_has_the_fields_of_the_public_surface(chain):
    before = time.time()
    (output,) = chain.generate(["w4 w5"], GREEDY)
    assert isinstance(output, RequestOutput) and isinstance(output.request_id, str)
    assert (output.prompt, output.prompt_token_ids, output.prompt_logprobs) == ("w4 w5", [1, 4, 5], None)
    assert (output.finished, output.num_cached_tokens, output.error) == (True, 0, None)
    (completion,) = output.outputs
    assert completion == CompletionOutput(0, "w6 w7 w8 w9 w10", [6, 7, 8, 9, 10], None, None, "length", None)
    assert before <= output.metrics.arrival_time <= time.time()


def test_metrics_are_seconds_that_fit_together(chain):
    start = time.perf_counter()
    outputs = chain.generate([[4]] * 20, SamplingParams(temperature=0, max_tokens=6))
    elapsed = time.perf_counter() - start
    for output in outputs:
        m = output.metrics
        assert 0 <= m.queue_time <= m.ttft <= m.e2e <= elapsed
        assert len(m.itl) == 5 and min(m.itl) > 0
        assert m.tpot == pytest.approx(sum(m.itl) / 5)
        assert m.ttft + sum(m.itl) == pytest.approx(m.e2e, abs=1e-3)
    assert outputs[-1].metrics.queue_time > outputs[0].metrics.ttft  # 8 rows: the last ones have waited


def test_tpot_is_none_below_two_outputs(chain):
    (output,) = chain.generate([[4]], SamplingParams(temperature=0, max_tokens=1))
    assert (output.metrics.tpot, output.metrics.itl) == (None, [])


# ------------------------------------------------------------------------------------------------ cached tokens


@pytest.fixture
def cached(folders):
    with LLM(folders["mixed"], overrides=[*WORDS, "kv_cache.num_blocks=17"]) as llm:
        yield llm


def cached_tokens(llm, *prompts):
    return [o.num_cached_tokens for o in llm.generate(list(prompts), GREEDY)]


@pytest.mark.parametrize(("length", "hit"), [(64, 48), (65, 64), (63, 48), (16, 0), (17, 16), (15, 0), (1, 0)])
def test_hit_is_whole_blocks_and_a_full_hit_gives_up_its_last(cached, length, hit):
    prompt = [i % 20 + 4 for i in range(length)]
    assert cached_tokens(cached, prompt) == [0]
    assert cached_tokens(cached, prompt) == [hit]


def test_hit_is_a_prefix_and_outputs_are_cached_as_well(cached):
    first = [5] * 16 + [6] * 16
    (output,) = cached.generate([first], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert cached_tokens(cached, [5] * 16 + [7] * 16, [7, *first]) == [16, 0]
    assert cached_tokens(cached, first + output.outputs[0].token_ids) == [48]


def test_salts_keep_caches_apart(cached):
    """CASES C13, as far as salts go."""
    prompt = [8] * 40
    salted = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("X", "Y")]
    for one in (prompt, *salted):
        assert cached_tokens(cached, one) == [0]
        assert cached_tokens(cached, one) == [32]


def test_evicted_block_breaks_the_prefix_and_is_never_found_under_its_old_key(cached):
    """CASES C14: the pool holds 16 blocks, a prompt of 33 tokens fills 2 and begins a third."""
    prompt = [9] * 33
    expected = [o.outputs[0].token_ids for o in cached.generate([prompt], GREEDY)]
    assert cached_tokens(cached, prompt) == [32]
    others = [[t] * 120 for t in (10, 11, 12)]  # 8 blocks each: every block has another content by now
    cached.generate(others, GREEDY)
    (output,) = cached.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 0
    assert [output.outputs[0].token_ids] == expected
    stats = cached.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def test_prefix_caching_can_be_switched_off(folders):
    with LLM(folders["mixed"], overrides=[*WORDS, "kv_cache.prefix_caching=false"]) as llm:
        assert cached_tokens(llm, [8] * 40) == cached_tokens(llm, [8] * 40) == [0]


def test_preemption_changes_neither_tokens_nor_cached_tokens(folders):
    prompts = [[4 + i] * 33 for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = {}
    for blocks in (9, 40):
        with LLM(folders["mixed"], overrides=[*WORDS, f"kv_cache.num_blocks={blocks}"]) as llm:
            outputs = llm.generate(prompts, params)
            found[blocks] = [o.outputs[0].token_ids for o in outputs]
            assert [o.num_cached_tokens for o in outputs] == [0] * 4
            assert (llm.engine.stats()["num_preemptions"] > 0) == (blocks == 9)
    assert found[9] == found[40]


def test_cold_and_warm_are_bit_equal_when_batch_invariant(folders):
    """CASES C17."""
    words = [*WORDS, "engine.batch_invariant=true"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=24)
    with LLM(folders["mixed"], overrides=words) as llm:
        cold, warm = (llm.generate([[4 + i % 20 for i in range(50)]], params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs


# -------------------------------------------------------------------------------------------- order of requests


def ending_order(llm, prompts):
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, GREEDY)
    order = []
    while llm.engine.has_unfinished_requests():
        order += [int(o.request_id) for o in llm.engine.step()]
    return order


def test_lower_priority_runs_first_and_ties_run_by_arrival(folders):
    words = [*WORDS, "policy=priority", "scheduler.max_num_seqs=1"]
    prompts = [{"prompt_token_ids": [4], "priority": p} for p in (5, 0, -3, 5, 0)] + [[4]]
    with LLM(folders["mixed"], overrides=words) as llm:
        assert ending_order(llm, prompts) == [2, 1, 4, 5, 0, 3]


def test_first_come_is_first_served_by_default(folders):
    with LLM(folders["mixed"], overrides=[*WORDS, "scheduler.max_num_seqs=1"]) as llm:
        assert ending_order(llm, [[4] * 9, [5], [6] * 3]) == [0, 1, 2]


def test_shortest_prompt_goes_first_under_its_policy(folders):
    with LLM(folders["mixed"], overrides=[*WORDS, "policy=shortest", "scheduler.max_num_seqs=1"]) as llm:
        assert ending_order(llm, [[4] * 9, [5], [6] * 3]) == [1, 2, 0]


def test_two_hundred_requests_pass_through_eight_rows(chain):
    prompts = [[4 + i % 15] for i in range(200)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 4) for i in range(200)]
    outputs = chain.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [
        [p[0] + 1 + j for j in range(s.max_tokens)] for p, s in zip(prompts, params, strict=True)
    ]
    stats = chain.engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


# ------------------------------------------------------------------------------------------------- llm.engine


def stepped(llm):
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return outputs


def test_final_outputs_come_once(chain):
    chain.engine.add_request("a", "w4", GREEDY)
    (output,) = stepped(chain)
    assert (output.request_id, output.outputs[0].text) == ("a", "w5 w6 w7 w8 w9")


def test_cumulative_outputs_grow(chain):
    params = SamplingParams(temperature=0, max_tokens=3, output_kind="cumulative", logprobs=0)
    chain.engine.add_request("a", "w4", params)
    outputs = stepped(chain)
    assert [o.outputs[0].text for o in outputs] == ["w5", "w5 w6", "w5 w6 w7"]
    assert [o.outputs[0].token_ids for o in outputs] == [[5], [5, 6], [5, 6, 7]]
    assert [len(o.outputs[0].logprobs) for o in outputs] == [1, 2, 3]
    assert [len(o.metrics.itl) for o in outputs] == [0, 1, 2]  # an output does not change once it is given
    assert [o.finished for o in outputs] == [False, False, True]


def test_delta_outputs_hold_what_is_new(chain):
    chain.engine.add_request("a", [0], SamplingParams(temperature=0, output_kind="delta", logprobs=0))
    outputs = stepped(chain)
    assert [o.outputs[0].token_ids for o in outputs] == [[1], [2], [3]]
    assert "".join(o.outputs[0].text for o in outputs) == "w2"
    assert [len(o.outputs[0].logprobs) for o in outputs] == [1, 1, 1]
    assert outputs[-1].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_generate_gives_whole_outputs_whatever_their_kind(chain, kind):
    (output,) = chain.generate([[4]], SamplingParams(temperature=0, max_tokens=3, output_kind=kind))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("w5 w6 w7", [5, 6, 7])


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_generate_gives_whole_outputs_whatever_kind_is_configured(folders, kind):
    words = [*WORDS, f"sampler.output_kind={kind}", "sampler.temperature=0", "sampler.max_tokens=3"]
    with LLM(folders["chain"], overrides=words) as llm:
        outputs = llm.generate([[4], [5]])
        assert [(o.finished, o.outputs[0].token_ids) for o in outputs] == [(True, [5, 6, 7]), (True, [6, 7, 8])]
        assert llm.chat([{"role": "user", "content": "w7"}])[0].outputs[0].text == "w10 w11 w12"
        assert not llm.engine.has_unfinished_requests()


def test_engine_refuses_an_id_that_is_running_or_no_id(chain):
    chain.engine.add_request("a", [4], GREEDY)
    with pytest.raises(ValueError, match="'a' is already running"):
        chain.engine.add_request("a", [5], GREEDY)
    for bad in ("", None, 7):
        with pytest.raises(ValueError, match="request_id must be a non-empty string"):
            chain.engine.add_request(bad, [5], GREEDY)
    assert [o.outputs[0].token_ids for o in stepped(chain)] == [[5, 6, 7, 8, 9]]
    chain.engine.add_request("a", [5], GREEDY)  # free again
    assert len(stepped(chain)) == 1
    assert chain.engine.step() == []
    assert chain.engine.abort("a") is None


def test_stats_count_requests_blocks_and_tokens(chain):
    before = chain.engine.stats()
    chain.engine.add_request("a", [4] * 20, GREEDY)
    assert chain.engine.stats()["num_waiting"] == 1
    chain.engine.step()
    during = chain.engine.stats()
    assert (during["num_waiting"], during["num_running"]) == (0, 1)
    assert during["num_free_blocks"] == before["num_free_blocks"] - 2
    assert during["prefill_tokens"] == before["prefill_tokens"] + 20
    assert chain.engine.abort("a").outputs[0].finish_reason == "abort"
    assert chain.engine.stats()["num_running"] == 0


# ------------------------------------------------------------------------------------------ faulty distributions

NAN, EMPTY, INFINITE = 17, 18, 19


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A chain whose tokens 17, 18 and 19 are followed by logits that are NaN, all -inf, and one +inf.

    NaN stands in the embedding, and so in keys and values; infinities are put into the logits, since no finite weight
    makes them.
    """
    vocab = 20
    table = torch.zeros(vocab, vocab)
    table[torch.arange(vocab), (torch.arange(vocab) + 1) % vocab] = 8.0
    folder = save_crafted(tmp_path_factory.mktemp("faulty") / "m", table)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN] = torch.nan
    save_file(weights, folder / "model.safetensors")
    words = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=8", "kv_cache.num_blocks=12"]
    with LLM(folder, overrides=words) as llm:
        model = llm.engine.core.executor._runner.model
        compute_logits = model.compute_logits

        def with_infinities(rows):
            logits = compute_logits(rows)
            logits[rows.argmax(-1) == EMPTY] = -torch.inf
            logits[rows.argmax(-1) == INFINITE, 3] = torch.inf
            return logits

        model.compute_logits = with_infinities
        yield llm


@pytest.mark.parametrize(("token", "text"), [
    (NAN, "logits are not numbers"), (EMPTY, "logits are not numbers"), (INFINITE, "logits are not numbers"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 1e-3])
def test_row_without_a_distribution_ends_its_request_alone(faulty, token, text, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=9, seed=1, logprobs=2)
    prompts = [[4], [token], [5] * 20, [4, token], [0]]
    outputs = faulty.generate(prompts, params)
    for i in (1, 3):
        assert outputs[i].outputs[0].finish_reason == "error"
        assert text in outputs[i].error
        assert outputs[i].outputs[0].token_ids == [] and len(outputs[i].outputs[0].logprobs) == 0
        assert outputs[i].finished and outputs[i].metrics.e2e > 0
    for i in (0, 2, 4):
        first = prompts[i][-1] + 1
        assert outputs[i].error is None
        assert outputs[i].outputs[0].token_ids == list(range(first, first + 9))


def test_request_that_fails_later_keeps_the_tokens_it_had(faulty):
    bad, good = faulty.generate([[14], [2]], SamplingParams(temperature=0, max_tokens=9))
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [15, 16, 17])
    assert good.outputs[0].token_ids == list(range(3, 12))


def test_blocks_of_a_faulty_request_harm_nobody_after_it(faulty):
    """Its keys and values are NaN: blocks that are handed on must not leak them through masked places."""
    for _ in range(3):
        faulty.generate([[NAN] * 30, [NAN] * 25, [4] * 20 + [NAN] * 3], SamplingParams(temperature=0, max_tokens=2))
        params = SamplingParams(temperature=0, max_tokens=7)
        outputs = faulty.generate([[n] * n for n in range(1, 9)], params)
        assert [o.outputs[0].token_ids for o in outputs] == [list(range(n + 1, n + 8)) for n in range(1, 9)]
    stats = faulty.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
