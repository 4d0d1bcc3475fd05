"""Every stage of the package passes the stage contract suite."""

import pytest

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase
from framework_samplers.allowed_ids import AllowedIds
from framework_samplers.bad_words import BadWords
from framework_samplers.greedy import Greedy
from framework_samplers.gumbel import Gumbel
from framework_samplers.logit_bias import LogitBias
from framework_samplers.min_p import MinP
from framework_samplers.min_tokens import MinTokens
from framework_samplers.no_repeat_ngram import NoRepeatNgram
from framework_samplers.penalties import Penalties
from framework_samplers.temperature import Temperature
from framework_samplers.top_k import TopK
from framework_samplers.top_p import TopP

CASES = (
    StageCase(AllowedIds, tuple(SamplingParams(allowed_token_ids=ids) for ids in ([10, 200, 299], range(0, 300, 2)))),
    StageCase(
        BadWords, tuple(SamplingParams(bad_words_token_ids=ids) for ids in ([[5], [7, 9]], [[5, 7, 10], [5, 200], [3]]))
    ),
    StageCase(
        NoRepeatNgram, tuple(SamplingParams(extra_args={"no_repeat_ngram": {"size": size}}) for size in (1, 2, 3))
    ),
    StageCase(LogitBias, tuple(SamplingParams(logit_bias=bias) for bias in ({0: -3.0, 299: 2.0}, {20: 5.0, 10: -9.5}))),
    StageCase(
        Penalties,
        (
            SamplingParams(repetition_penalty=1.3),
            SamplingParams(frequency_penalty=0.5, presence_penalty=-0.2),
            SamplingParams(repetition_penalty=0.7, frequency_penalty=-1.0),
        ),
    ),
    StageCase(MinTokens, tuple(SamplingParams(min_tokens=n, stop_token_ids=[3, 299][: 1 + n % 2]) for n in (3, 4, 16))),
    StageCase(Temperature, tuple(SamplingParams(temperature=t) for t in (0.5, 1.7, 1e300))),
    StageCase(MinP, tuple(SamplingParams(min_p=p) for p in (0.05, 0.5, 1.0))),
    StageCase(TopK, tuple(SamplingParams(top_k=k) for k in (2, 7, 299))),
    StageCase(TopP, tuple(SamplingParams(top_p=p) for p in (0.1, 0.9, 1e-9, 0.9999999))),
    StageCase(Greedy, (SamplingParams(), SamplingParams(temperature=0))),
    StageCase(Gumbel, (SamplingParams(), SamplingParams(seed=3))),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stage_keeps_its_contract(case, check):
    check(case)
