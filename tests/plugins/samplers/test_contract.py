"""Every stage of the package passes the stage contract suite."""

import pytest

from framework import SamplingParams
from framework.testing.stages import CHECKS, StageCase
from framework_samplers.greedy import Greedy
from framework_samplers.gumbel import Gumbel
from framework_samplers.min_p import MinP
from framework_samplers.min_tokens import MinTokens
from framework_samplers.temperature import Temperature
from framework_samplers.top_k import TopK
from framework_samplers.top_p import TopP

CASES = (
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
