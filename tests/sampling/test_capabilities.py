"""Stages that do not go together are refused when the pipeline is built, with both names and a way out."""

from dataclasses import dataclass

import pytest

from framework.errors import ConfigError, PluginError
from framework.interfaces import Capabilities, StageSpec


def stage(name, kind, keeps=(), needs=(), **members):
    """A stage class that does nothing, of any kind."""
    methods = {m: lambda self, *a: None for m in ("add_request", "validate", "commit", "wants", "apply", "bounds",
                                                  "select", "observe", "collect", "__init__")}  # fmt: skip
    spec = StageSpec(name, kind, caps=Capabilities(frozenset(needs), frozenset(keeps)))
    return type(name.title(), (), {**methods, "spec": spec, **members})


def conflict(bench, names, text, error=ConfigError, **more):
    with pytest.raises(error, match=text):
        bench(*names, **more)


def test_two_select_stages_are_refused(bench):
    text = "'greedy' and 'gumbel' both pick the token.*sampler.stages.greedy=null or sampler.stages.gumbel=null"
    conflict(bench, ("greedy", "gumbel"), text)


def test_no_select_stage_is_refused(bench):
    conflict(bench, ("temperature", "top_k"), r"\(temperature, top_k\) has no select stage.*\+sampler/stage=gumbel")


@pytest.mark.parametrize("names", [("top_k", "temperature", "gumbel"), ("gumbel", "temperature")])
def test_logits_may_not_change_once_they_were_decided_on(bench, names):
    before = names[0]
    conflict(bench, names, rf"'temperature' .* after '{before}'.*\+sampler.stages.temperature.before={before}")


def test_observers_may_stand_anywhere(bench):
    watch = stage("watch", "observe")
    assert bench("gumbel", "watch", others={"watch": watch}).pipeline.stages[1].key == "watch"
    assert bench("watch", "top_k", "gumbel", others={"watch": watch}).pipeline.stages[0].key == "watch"


def test_a_stage_that_may_pick_masked_tokens_is_refused_beside_a_mask(bench):
    others = {"wall": stage("wall", "mask"), "hole": stage("hole", "select")}
    text = "'hole' does not keep 'kept_set'.*'wall' forbids.*hole=null or sampler.stages.wall=null"
    conflict(bench, ("wall", "hole"), text, others=others)
    others["hole"] = stage("hole", "select", keeps=("kept_set",))
    bench("wall", "hole", others=others)


def test_a_need_is_met_by_the_engine_or_by_every_other_stage(bench):
    others = {"late": stage("late", "elementwise", needs=("host_tokens",)),
              "proud": stage("proud", "threshold", needs=("argmax",))}  # fmt: skip
    conflict(bench, ("late", "gumbel"), "'late' needs 'host_tokens', which this engine does not provide", others=others)
    bench("late", "gumbel", others=others, provided=frozenset({"host_tokens"}))
    conflict(bench, ("proud", "gumbel"), "'proud' needs 'argmax', which stage 'gumbel' does not keep", others=others)
    bench("temperature", "proud", "greedy", others=others)
    others["watch"] = stage("watch", "observe")  # changes nothing, whatever it keeps
    bench("proud", "greedy", "watch", others=others)


def test_what_the_engine_is_configured_for_is_asked_of_every_stage(bench):
    others = {"odd": stage("odd", "elementwise", keeps=("drafts",))}
    bench(required=frozenset({"batch_invariant", "drafts"}))
    text = "'odd' does not keep 'batch_invariant'.*sampler.stages.odd=null, or turn 'batch_invariant' off"
    conflict(bench, ("odd", "gumbel"), text, others=others, required=frozenset({"batch_invariant", "drafts"}))


def test_a_stage_without_the_method_of_its_kind_is_refused(bench):
    broken = stage("broken", "threshold", bounds=None, commit=None)
    text = "'broken' .*is of kind threshold and lacks commit, bounds"
    conflict(bench, ("broken", "gumbel"), text, PluginError, others={"broken": broken})


def test_a_stage_that_names_a_fused_operation_has_its_operands(bench):
    spec = StageSpec("quick", "elementwise", fused="scale")
    text = "'quick' .*is of kind elementwise, fused as scale, and lacks operands"
    conflict(bench, ("quick", "gumbel"), text, PluginError, others={"quick": stage("quick", "elementwise", spec=spec)})


@pytest.mark.parametrize("spec", [None, StageSpec("odd", "shape")])
def test_a_stage_without_a_kind_is_refused(bench, spec):
    odd = stage("odd", "mask", spec=spec)
    conflict(
        bench,
        ("odd", "gumbel"),
        "'odd' .*declares no StageSpec with a kind among mask",
        PluginError,
        others={"odd": odd},
    )


def test_a_stage_whose_spec_has_another_name_than_its_announcement_is_refused(bench):
    text = "stage 'odd': the plugin is announced as 'odd' and its StageSpec says 'even'. Give the ComponentSpec and the"
    conflict(bench, ("odd", "gumbel"), text, PluginError, others={"odd": stage("even", "mask")})


@dataclass(frozen=True)
class Options:
    size: int = 1


def test_a_stage_gets_its_own_options(bench):
    seen = []
    sized = stage("sized", "observe", options_class=Options, __init__=lambda self, options, ctx: seen.append(options))
    bench("sized", "gumbel", others={"sized": sized}, options={"sized": {"size": 4}})
    bench("sized", "gumbel", others={"sized": sized})
    assert seen == [Options(4), Options(1)]


def test_what_a_stage_says_of_its_options_names_its_key(bench):
    def refuse(self, options, ctx):
        raise ValueError("size must be even")

    sized = stage("sized", "observe", options_class=Options, __init__=refuse)
    conflict(bench, ("sized", "gumbel"), "^sampler.stages.sized: size must be even", others={"sized": sized})
    conflict(
        bench,
        ("top_k", "gumbel"),
        r"sampler\.stages\.top_k\.k: there is no such key\. Known: none",
        options={"top_k": {"k": 3}},
    )
