"""Each check of models fails for a family with the fault that it is there for, and says which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.errors import ConfigError, NotBuiltError
from framework.interfaces import ForwardContext, ModelOutput
from framework.plugins import ComponentSpec, registry
from framework.testing.checking import run_check
from framework.testing.kits import suite_of
from framework.testing.model_bench import ModelCase
from framework.testing.model_engine import ENGINE_CHECKS
from framework.testing.models import CHECKS, check_model
from framework_models.cases import llama, mixtral
from framework_models.llama import Llama
from framework_models.mixtral import Mixtral

(SOUND,) = llama()
(MIXTURE,) = mixtral()
LLAMA = {check.__name__: check for check in (*CHECKS, *ENGINE_CHECKS)}


def changed(output: ModelOutput, change: Any) -> ModelOutput:
    return ModelOutput(change(output.hidden), output.features)


class Mean(Llama):
    def forward(self, x, positions, ctx):
        return changed(super().forward(x, positions, ctx), lambda hidden: hidden - hidden.mean(0))


class OrderForPositions(Llama):
    def forward(self, x, positions, ctx):
        return super().forward(x, torch.arange(len(x)), ctx)


class FirstRows(Llama):
    def forward(self, x, positions, ctx):
        if ctx.wanted is None:
            return super().forward(x, positions, ctx)
        plain = ForwardContext(ctx.plans, ctx.feature_layers)
        return changed(super().forward(x, positions, plain), lambda hidden: hidden[: len(ctx.wanted)])


class FeaturesInOrder(Llama):
    def forward(self, x, positions, ctx):
        output = super().forward(x, positions, ctx)
        return ModelOutput(output.hidden, tuple(output.features[:1]))


class LooksAtValues(Llama):
    def forward(self, x, positions, ctx):
        if float(x.abs().max()) > 1e9:
            x = x / 2
        return super().forward(x, positions, ctx)


class LooksAtWeights(Llama):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        self.scale = float(self.embed_tokens.weight.abs().max())


class TakesTwice(Llama):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        ctx.weights.take("model.norm.weight", (self.stack.final_norm.weight.shape[0],))


class DeclaresOneMore(Llama):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        ctx.add_layer("full", 4, 2, 16, 0.25)


class NeverTied(Llama):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        if config["tie_word_embeddings"]:
            ctx.weights.take("score.weight", tuple(self.embed_tokens.weight.shape))


class IgnoresKeys(Llama):
    @classmethod
    def read_config(cls, config):
        return super().read_config({k: v for k, v in config.items() if k != "quantization_config"})


class OtherVocabulary(Llama):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        self.vocab_size += 1


class ForgetsDtype(Llama):
    def compute_logits(self, hidden):
        return torch.zeros(len(hidden), self.vocab_size)


class CountsPadding(Mixtral):
    def forward(self, x, positions, ctx):
        return super().forward(x, positions, ForwardContext(ctx.plans, ctx.feature_layers, wanted=ctx.wanted))


FAULTS = [
    (Mean, "check_nothing_but_attention_mixes_tokens", "rows of a step with other tokens, in another order"),
    (OrderForPositions, "check_nothing_but_attention_mixes_tokens", "in another order"),
    (FirstRows, "check_wanted_rows_are_those_of_a_whole_step", "rows that are wanted"),
    (FeaturesInOrder, "check_features_come_as_asked", "1 features for the layers (2, 0)"),
    (LooksAtValues, "check_a_step_can_be_exported", ""),
    (LooksAtWeights, "check_layers_are_known_without_weights", "cannot be built without its weights"),
    (TakesTwice, "check_every_weight_is_taken_once", "model.norm.weight is taken twice"),
    (DeclaresOneMore, "check_layers_are_used_in_their_order", "attends in layers [0, 1], declared were [0, 1, 2]"),
    (NeverTied, "check_head_may_be_the_embedding", "takes 2 matrices of the vocabulary when"),
    (IgnoresKeys, "check_what_it_does_not_know_is_refused", "'no_such_thing'}} is accepted and ignored"),
    (OtherVocabulary, "check_it_has_what_a_model_has", "vocab_size is 62, and the config says 61"),
    (ForgetsDtype, "check_engine_serves_dummy_weights", "the best of the dummy logprobs is -4.111"),
    (CountsPadding, "check_padding_is_not_counted", "counts padding"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "check", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_fault_is_found_and_named(target: Any, check: str, reason: str) -> None:
    config = MIXTURE.config if issubclass(target, Mixtral) else SOUND.config
    outcome = run_check(LLAMA[check], ModelCase(target, config))
    assert outcome.result == "failed" and reason in outcome.reason, outcome


class ForgetsItsNeighbours(Llama):
    """Sound token by token, and wrong beside others: each takes something of the one before it in the step."""

    def forward(self, x, positions, ctx):
        return changed(super().forward(x, positions, ctx), lambda hidden: hidden + hidden.roll(1, 0) * 0.1)


def test_engine_that_gives_other_logprobs_in_company_is_found_out() -> None:
    outcome = run_check(LLAMA["check_engine_gives_equal_logprobs"], ModelCase(ForgetsItsNeighbours, SOUND.config))
    assert outcome.result == "failed" and "apart among others and alone" in outcome.reason, outcome


def test_family_that_no_engine_takes_fails_with_the_reason() -> None:
    class Refuses(Llama):
        def __init__(self, config, ctx):
            if ctx.backend.name != "plain":
                raise ConfigError("model.path: this family is served on Sundays alone. Wait")
            super().__init__(config, ctx)

    for check in ENGINE_CHECKS:
        outcome = run_check(check, ModelCase(Refuses, SOUND.config))
        assert outcome.result == "failed" and "served on Sundays alone" in outcome.reason, outcome


@pytest.mark.parametrize(("error", "result"), [(ConfigError, "failed"), (NotBuiltError, "skipped")])
def test_features_are_told_or_refused_as_not_built(error: type[Exception], result: str) -> None:
    class Breaks(Llama):
        def forward(self, x, positions, ctx):
            if ctx.feature_layers:
                raise error("features are none of its business")
            return super().forward(x, positions, ctx)

    outcome = run_check(LLAMA["check_features_come_as_asked"], ModelCase(Breaks, SOUND.config))
    assert outcome.result == result and "none of its business" in outcome.reason, outcome


def test_layers_that_no_attention_serves_here_are_skipped_with_the_reason() -> None:
    class Strange(Llama):
        def attention(self, ctx, dense, index, rotary, **others):
            ctx.add_layer("both", 4, 1, 24, 0.25, softcap=5.0, value_dim=16)
            return super().attention(ctx, dense, index, rotary, **others)

    for check in ENGINE_CHECKS:
        outcome = run_check(check, ModelCase(Strange, SOUND.config))
        assert outcome.result == "skipped", outcome
        assert "mla_torch: it does not serve soft caps of scores, which the model has" in outcome.reason, outcome


@pytest.mark.parametrize(("change", "text"), [
    (("framework.scheduler.prefix_cache.PrefixCache._find", lambda self, request: [[] for _ in range(1)]),
     "0 tokens come from the prefix cache, 24 should"),
    (("framework.testing.model_engine.FEW_BLOCKS", 50), "nothing was preempted in a pool of 50 blocks a KV group"),
])  # fmt: skip
def test_what_a_check_is_to_see_must_have_happened(monkeypatch: pytest.MonkeyPatch, change: Any, text: str) -> None:
    monkeypatch.setattr(*change)
    outcome = run_check(LLAMA["check_engine_gives_equal_logprobs"], SOUND)
    assert outcome.result == "failed" and text in outcome.reason, outcome


def test_sound_family_passes_in_one_call() -> None:
    check_model(SOUND)


def test_family_without_cases_is_told_to_name_some(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry()
    spec = ComponentSpec("model", "mine", "framework_models.llama:Llama", provides=("Mine",), dist="a-plugin")
    monkeypatch.setitem(found._specs, ("model", "mine"), spec)
    with pytest.raises(ConfigError, match=r"model/mine: .* Give its ComponentSpec cases=.*, ModelCases of"):
        suite_of(found, "model", "mine")
