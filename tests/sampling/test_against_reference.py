"""The whole pipeline against plain float64: kept sets, processed logprobs and draws of random parameters and mixes.

Requests of all sorts share the batches of an engine whose steps are in flight, whose prompts come in chunks and whose
pool is too small for all of them. What it tells of each token is compared with `reference`, token by token.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from framework import LLM, SamplingParams
from framework.testing.crafted import save_crafted

from .reference import NearTie, Row, draw, log_softmax, processed

VOCAB, NUM_TOKENS = 300, 6
WORDS = (
    "engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=9",
    "kv_cache.block_size=4", "kv_cache.num_blocks=20", "engine.async_scheduling=true",
    "sampler.logprobs_mode=processed_logprobs",
)  # fmt: skip
COUNTS = [pytest.param(12, id="quick"), pytest.param(400, id="full", marks=pytest.mark.full)]
BATCH = 6


@pytest.fixture(scope="module")
def table():
    """Logits in steps of a quarter, so that many are equal."""
    return (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)) * 3).mul(4).round().div(4)


@pytest.fixture(scope="module", params=["gumbel", "full"])
def llm(tmp_path_factory, table, request):
    folder = save_crafted(tmp_path_factory.mktemp("reference") / "model", table)
    with LLM(folder, overrides=[*WORDS, f"sampler={request.param}"]) as llm:
        yield llm


# -------------------------------------------------------------------------------------------------------- parameters

ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(st.integers(0, 40), min_size=1, max_size=3)
share = st.floats(0.01, 1.0)
FIELDS = {
    "temperature": {"temperature": st.sampled_from([0, 1.0]) | st.floats(0.1, 4.0)},
    "top_k": {"top_k": st.sampled_from([-1, 1, 2, VOCAB]) | st.integers(2, 120)},
    "top_p": {"top_p": share},
    "min_p": {"min_p": st.floats(0.0, 0.5)},
    "penalties": {
        "repetition_penalty": st.floats(0.5, 3.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
    },
    "logit_bias": {"logit_bias": st.dictionaries(ids, st.floats(-20, 20), max_size=5)},
    "allowed_ids": {"allowed_token_ids": st.lists(ids, min_size=1, max_size=3) | st.lists(ids, min_size=40)},
    "bad_words": {"bad_words_token_ids": st.lists(few_ids, max_size=5)},
    "min_tokens": {"stop_token_ids": st.lists(st.integers(0, 60)), "min_tokens": st.integers(0, NUM_TOKENS)},
}
"""Fields of a request, by the stage that reads them."""
SWITCHED = ("bad_words", "logit_bias", "penalties", "temperature", "min_p", "top_k", "top_p", "typical", "xtc")
"""Stages that a request may switch off."""
EXTRA = {
    "no_repeat_ngram": st.fixed_dictionaries({"size": st.integers(1, 3)}),
    "dry": st.fixed_dictionaries(
        {"multiplier": st.floats(0.1, 4)},
        optional={"base": st.floats(1, 3), "allowed_length": st.integers(1, 3), "range": st.integers(0, 12),
                  "sequence_breakers": few_ids},
    ),
    "dynamic_temperature": st.fixed_dictionaries(
        {"low": st.floats(0.1, 1), "high": st.floats(1, 3)}, optional={"exponent": st.floats(0.3, 3)}
    ),
    "typical": st.fixed_dictionaries({"mass": share}),
    "top_n_sigma": st.fixed_dictionaries({"n": st.floats(0.1, 3)}),
    "epsilon": st.fixed_dictionaries({"epsilon": st.floats(0, 0.2)}),
    "eta": st.fixed_dictionaries({"epsilon": st.floats(0, 0.2)}),
    "xtc": st.fixed_dictionaries({}, optional={"threshold": st.floats(0, 0.6), "probability": st.floats(0, 1)}),
}  # fmt: skip
"""Parameters of stages without a field."""
prompts = st.lists(st.integers(0, 12) | ids, min_size=1, max_size=20)


@st.composite
def request_of(draw, stages):
    """(prompt, SamplingParams): some of the parameters that the stages read, some of the other stages switched off."""
    used = draw(st.sets(st.sampled_from([s for s in stages if s in FIELDS or s in EXTRA]), max_size=6))
    others = [s for s in stages if s in SWITCHED and s not in used]
    switches = draw(st.dictionaries(st.sampled_from(others), st.booleans(), max_size=2)) if others else {}
    fields = draw(st.fixed_dictionaries({k: v for s in sorted(used) for k, v in FIELDS.get(s, {}).items()}))
    extra = draw(st.fixed_dictionaries({s: EXTRA[s] for s in sorted(used & set(EXTRA))}))
    forbidden = {word[0] for word in fields.get("bad_words_token_ids", ()) if len(word) == 1}
    assume(not set(fields.get("allowed_token_ids", [VOCAB])) <= forbidden)  # refused at admission
    common = {"seed": draw(st.integers(0, 2**64 - 1)), "max_tokens": NUM_TOKENS, "logprobs": -1}
    return draw(prompts), SamplingParams(**common, **fields, stages=switches, extra_args=extra)


# ---------------------------------------------------------------------------------------------------------- the check


class Compared:
    """How many rows were compared, and how many lay too near to a bound."""

    rows = near = draws = 0


def check(table, stages, prompt, params, output, seen):
    """Each token of an output, and the error of one that ended because nothing was left to draw."""
    completion = output.outputs[0]
    tokens = completion.token_ids
    for place in range(len(tokens) + (completion.finish_reason == "error")):
        row = Row(params, prompt, tokens[:place], params.seed)
        try:
            wanted = processed(table[row.text[-1]].double().numpy(), row, stages)
        except NearTie:
            seen.near += 1
            continue
        seen.rows += 1
        if place == len(tokens):
            assert not np.isfinite(wanted).any() and "no token is left to choose" in output.error
            return
        entry = completion.logprobs[place]
        got = np.array([entry[i].logprob for i in range(VOCAB)])
        kept = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(got), kept, f"token {place} of {row}")
        scale = np.abs(wanted[kept]).max()
        np.testing.assert_allclose(
            got[kept], log_softmax(wanted)[kept], rtol=1e-5, atol=1e-5 * (1 + scale), err_msg=f"token {place} of {row}"
        )
        check_token(tokens[place], wanted, row, scale, seen)


def check_token(token, wanted, row, scale, seen):
    if row.params.is_greedy:
        best = np.flatnonzero(wanted > wanted.max() - 1e-4)
        assert token in best and (token == best[0] or len(set(wanted[best])) > 1)
        return
    expected, gap = draw(wanted, row.seed, len(row.text))
    if gap > 1e-4 * (1 + scale):
        assert token == expected
        seen.draws += 1


@pytest.mark.parametrize("count", COUNTS)
def test_pipeline_agrees_with_the_reference_for_random_mixes(llm, table, count):
    stages = [stage.key for stage in llm.engine.config.sampler.stages]
    seen = Compared()

    @settings(
        max_examples=count, deadline=None, derandomize=count <= 12, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # a row says more than a smaller mix
    )  # fmt: skip
    @given(st.lists(request_of(stages), min_size=BATCH, max_size=BATCH))
    def search(requests):
        asked, params = zip(*requests, strict=True)
        outputs = llm.generate(list(asked), list(params), use_tqdm=False)
        for (prompt, wanted), output in zip(requests, outputs, strict=True):
            check(table, stages, prompt, wanted, output, seen)

    search()
    assert seen.rows > 20 * count and seen.draws > 5 * count and seen.near < seen.rows / 5, vars(seen)
