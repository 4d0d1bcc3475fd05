"""Public bug reports about sampling, one test or more each, through engines with steps in flight and without.

C1, C2, C5, C12 and C17 of the list of cases. Cases of one stage are beside the tests of that stage.
"""

import pytest
import torch
from scipy.stats import chisquare

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted

VOCAB = 24
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(12)) * 2
FIVE_BEST = set(LOGITS.topk(5).indices.tolist())
TIED = [1.0, 1.0, 0.0]
SMALL = ("engine.dtype=float32", "engine.max_model_len=128", "kv_cache.num_blocks=80", "scheduler.max_num_seqs=8")


@pytest.fixture(scope="module", params=["sync", "async"])
def start(tmp_path_factory, request):
    """Starts an engine over a table of logits, which each token of the vocabulary is followed by."""
    root, made = tmp_path_factory.mktemp("cases"), {}

    def run(table, *words):
        key = (repr(table.tolist()), *words)
        if key not in made:
            folder = save_crafted(root / f"m{len(made)}", table)
            steps = f"engine.async_scheduling={str(request.param == 'async').lower()}"
            made[key] = LLM(folder, overrides=[*SMALL, steps, *words])
        return made[key]

    yield run
    for llm in made.values():
        llm.close()


@pytest.fixture
def flat(start):
    """Every token is followed by LOGITS."""
    return start(LOGITS.expand(VOCAB, VOCAB).contiguous())


@pytest.fixture
def mixed(start):
    return start(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5)


def tokens(llm, prompts, params):
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


# --------------------------------------------------------------- C1: a seeded request beside one without a seed


def test_c1_seeded_request_is_the_same_in_every_run_and_alone(mixed):
    seeded, other = SamplingParams(seed=42, temperature=0.8), SamplingParams(temperature=0.8)
    alone = tokens(mixed, [[5, 6]], seeded)[0]
    runs = [tokens(mixed, [[5, 6], [7]], [seeded, other]) for _ in range(4)]
    assert len(alone) == 16 and [a for a, _ in runs] == [alone] * 4
    assert len({b for _, b in runs}) > 1


# ------------------------------------------------------------------------- C2: top_k off beside top_k in use


@pytest.mark.parametrize("off", [0, -1, VOCAB, VOCAB + 1, 2**31 - 1])
def test_c2_top_k_that_is_off_keeps_the_whole_vocabulary_beside_a_row_of_five(flat, off):
    wide, narrow = (SamplingParams(temperature=5.0, top_k=k, seed=3, max_tokens=120) for k in (off, 5))
    found = tokens(flat, [[0]] * 4, [wide.replace(seed=1), narrow, wide.replace(seed=2), narrow.replace(seed=4)])
    assert set(found[0]) | set(found[2]) == set(range(VOCAB))
    assert set(found[1]) | set(found[3]) == FIVE_BEST


def test_c2_all_ways_to_switch_top_k_off_give_equal_tokens(flat):
    params = [SamplingParams(temperature=5.0, top_k=k, seed=3, max_tokens=60) for k in (-1, 0, VOCAB, VOCAB + 7, 5)]
    *off, five = tokens(flat, [[0]] * 5, params)
    assert len(set(off)) == 1 and set(five) <= FIVE_BEST


# ----------------------------------------------------------------------------------- C5: ties of a greedy row


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 0, "top_p": 0.9}, {"top_k": 1}, {"temperature": 9, "top_k": 1}],
    ids=str,
)
def test_c5_greedy_row_takes_the_lowest_of_equal_ids_alone_and_beside_a_row_that_draws(start, params):
    llm = start(torch.tensor([TIED] * 3))
    greedy, noisy = SamplingParams(max_tokens=30, **params), SamplingParams(max_tokens=120, temperature=1.0)
    assert tokens(llm, [[2]], greedy) == [(0,) * 30]
    beside = tokens(llm, [[2]] * 3, [noisy, greedy, noisy])
    assert beside[1] == (0,) * 30 and set(beside[0]) == {0, 1, 2}


def test_c5_ids_are_those_of_the_vocabulary_also_where_few_are_candidates(start):
    logits = torch.full((300,), -5.0)
    logits[[140, 271, 299]] = torch.tensor([3.0, 3.0, 2.0])
    llm = start(logits.expand(300, 300).contiguous())
    greedy = [SamplingParams(max_tokens=8, temperature=0, top_k=k, top_p=0.5) for k in (-1, 2, 40)]
    drawn = SamplingParams(max_tokens=100, temperature=1.0, top_k=2, seed=1)
    *rows, both = tokens(llm, [[0]] * 4, [*greedy, drawn])
    assert rows == [(140,) * 8] * 3 and set(both) == {140, 271}


# -------------------------------------------------------------------- C12: seeds over repeated and serial requests


def test_c12_a_seed_repeats_and_another_one_gives_other_tokens(mixed):
    first, again, other = (tokens(mixed, [[4]], SamplingParams(seed=s, temperature=1.5))[0] for s in (7, 7, 8))
    assert first == again != other


def test_c12_serial_requests_without_a_seed_are_independent(flat):
    """Eight in a row: no two are equal, and their first tokens are spread as the draws of one request are."""
    params = SamplingParams(temperature=3.0)
    found = [tokens(flat, [[4]], params)[0] for _ in range(8)]
    assert len(set(found)) == 8
    firsts = [tokens(flat, [[4]] * 8, params.replace(max_tokens=1)) for _ in range(60)]
    counts = torch.zeros(VOCAB).index_add_(0, torch.tensor(firsts).flatten(), torch.ones(480))
    expected = (LOGITS / 3).softmax(-1) * 480
    few = expected < 5
    seen, wanted = ([*x[~few].tolist(), float(x[few].sum())] for x in (counts, expected))
    assert chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue > 1e-6


# ------------------------------------------------------------------------------------------ C17: cold and warm


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_c17_cold_and_warm_are_bit_equal(start, mode):
    """A prompt whose blocks are found in the cache gives the logits, bit for bit, of one that is computed."""
    words = ("engine.load_format=dummy", "engine.batch_invariant=true", "kv_cache.block_size=8")
    llm = start(torch.zeros(VOCAB, VOCAB), *words, f"sampler.logprobs_mode={mode}")
    prompt = [4 + i % 20 for i in range(45)]
    params = SamplingParams(temperature=0, logprobs=-1, max_tokens=12)
    other, cold, warm = (llm.generate([p], params, use_tqdm=False)[0] for p in ([3, *prompt[1:]], prompt, prompt))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 40)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs
    assert cold.outputs[0].logprobs[0] != other.outputs[0].logprobs[0]  # the model looks back over the whole prompt
