"""What `run=check` runs a stage of this package with, where trying parameters would not say enough."""

from __future__ import annotations

from framework.request import SamplingParams
from framework.testing.stages import StageCase
from framework_samplers.mirostat import Mirostat
from framework_samplers.options import MirostatConfig, ThinkingBudgetConfig
from framework_samplers.thinking_budget import ThinkingBudget


def _steering(**given: float) -> SamplingParams:
    return SamplingParams(extra_args={"mirostat": given})


MIROSTAT = StageCase(
    Mirostat,
    wanting=(SamplingParams(), _steering(tau=0.5, eta=0.5), _steering(tau=2.0), SamplingParams(seed=3)),
    plain=(SamplingParams(temperature=0),),
    options=MirostatConfig(),
)


def _thinking(max_tokens: int) -> SamplingParams:
    return SamplingParams(extra_args={"thinking_budget": {"max_tokens": max_tokens}})


THINKING_BUDGET = StageCase(
    ThinkingBudget,
    wanting=(_thinking(0), _thinking(2), _thinking(4)),
    options=ThinkingBudgetConfig(start=2, end=[5, 6]),  # ids that come in the suite's requests
)
