"""Seeds: the same tokens whatever surrounds a request, and other tokens for other seeds."""

import pytest

from framework import LLM, SamplingParams

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.block_size=8")
PROMPTS = [[4, 5, 6], [7] * 11, [8, 9], [10] * 20, [11], [12, 13, 14, 15], [16] * 9, [17, 18]]


def tokens(llm, prompts, params):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def seeded(seed, **more):
    return SamplingParams(seed=seed, max_tokens=16, ignore_eos=True, temperature=1.5, **more)


def test_seeded_request_is_the_same_alone_and_beside_others_again_and_again(mixed):
    """CASES C1."""
    a = SamplingParams(seed=42, temperature=0.8, ignore_eos=True)
    alone = tokens(mixed, [[4, 5]], a)[0]
    runs = [tokens(mixed, [[4, 5], [6]], [a, SamplingParams(ignore_eos=True)]) for _ in range(4)]
    assert [run[0] for run in runs] == [alone] * 4
    assert len({tuple(run[1]) for run in runs}) == 4


def test_seed_none_draws_another_seed_for_every_request(mixed):
    found = tokens(mixed, [[4]] * 8, SamplingParams(ignore_eos=True, temperature=2.0))
    assert len(set(map(tuple, found))) == 8


def test_seeds_count_modulo_2_to_the_64(mixed):
    pairs = [(-1, 2**64 - 1), (-(2**63), 2**63)]
    for one, other in pairs:
        first, second = tokens(mixed, [[4], [4]], [seeded(one), seeded(other)])
        assert first == second
    others = tokens(mixed, [[4]] * 4, [seeded(s) for s in (0, 1, 2**32, 2**63)])
    assert len(set(map(tuple, others))) == 4  # every bit counts


def test_greedy_rows_do_not_depend_on_the_seed(mixed):
    found = tokens(mixed, [[4]] * 3, [SamplingParams(temperature=0, seed=s) for s in (None, 1, 2)])
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def expected(folders):
    with LLM(folders["mixed"], overrides=[*SMALL, "engine.seed=7", "kv_cache.prefix_caching=false"]) as llm:
        return tokens(llm, PROMPTS, seeded(None))


SETTINGS = {
    "one row": ["scheduler.max_num_seqs=1"],
    "chunks of three": ["scheduler.max_num_batched_tokens=3"],
    "whole prompts": ["scheduler.chunked_prefill=false", "scheduler.max_num_batched_tokens=24"],
    "large blocks": ["kv_cache.block_size=32"],
    "tight pool": ["kv_cache.num_blocks=9"],
    "batch invariant": ["engine.batch_invariant=true"],
}


@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
def test_engine_seed_and_arrival_give_the_same_tokens_in_every_setting(folders, expected, words):
    with LLM(folders["mixed"], overrides=[*SMALL, "engine.seed=7", *words]) as llm:
        assert tokens(llm, PROMPTS, seeded(None)) == expected
        if "kv_cache.num_blocks=9" in words:
            assert llm.engine.stats()["num_preemptions"] > 0  # the seed of an unseeded request outlives it
        again = tokens(llm, PROMPTS, seeded(None))
    assert again != expected  # later arrivals


def test_another_engine_seed_gives_other_tokens_and_a_seed_of_ones_own_stands_over_it(folders, expected):
    with LLM(folders["mixed"], overrides=[*SMALL, "engine.seed=8"]) as llm:
        found = tokens(llm, PROMPTS, seeded(None))
        assert all(a != b for a, b in zip(found, expected, strict=True))
        own = tokens(llm, [[4]], seeded(7))
    with LLM(folders["mixed"], overrides=[*SMALL, "engine.seed=9"]) as llm:
        assert tokens(llm, [[4]], seeded(7)) == own


def test_prefix_hit_changes_no_token(mixed):
    prompt = list(range(4, 24)) * 2
    (cold,) = mixed.generate([prompt], seeded(3))
    (warm,) = mixed.generate([prompt], seeded(3))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
