"""Words become frozen dataclasses; every key is known and every value has its type, or an error names it."""

import subprocess
import sys
import threading
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase

import framework.composing as composing
from framework import SamplingParams
from framework.config import (
    ComponentConfig,
    Config,
    EngineOptions,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
    compose,
)
from framework.discovery import dist_name, entry_points_of
from framework.errors import ConfigError, FrameworkError, NotBuiltError, PluginError
from framework.plugins import ComponentSpec, Registry, hookimpl

SHARED = ("grammar", "allowed_ids", "min_tokens", "bad_words", "no_repeat_ngram", "logit_bias", "penalties")
"""Stages that greedy rows see as well."""


def test_yaml_defaults_equal_those_of_the_dataclasses():
    assert compose() == Config()
    stages = [stage.key for stage in Config().sampler.stages]
    assert stages == [*SHARED, "temperature", "min_p", "top_k", "top_p", "gumbel"]


def test_every_sampling_parameter_is_a_key_of_the_sampler():
    cfg = composing.load([], composing.search_roots())
    assert set(cfg.sampler) - {"name", "stages", "logprobs_mode"} == {f.name for f in fields(SamplingParams)} - {
        "stages"
    }


def test_words_set_what_they_name():
    config = compose(["+backend=cpu", "scheduler.max_num_seqs=16", "+engine.dtype=bfloat16", "sampler.stop=[a,b]"])
    assert config.backend.name == "cpu"
    assert config.scheduler.max_num_seqs == 16
    assert config.engine.dtype == "bfloat16"
    assert dict(config.sampler.params) == {"stop": ["a", "b"]}


def test_greedy_pipeline_holds_what_may_change_the_best_token():
    assert [stage.key for stage in compose(["sampler=greedy"]).sampler.stages] == [*SHARED, "greedy"]


@pytest.mark.parametrize("word", ["sampler.stages.min_p=null", "~sampler.stages.min_p"])
def test_stage_is_removed(word):
    stages = [stage.key for stage in compose([word]).sampler.stages]
    assert stages == [*SHARED, "temperature", "top_k", "top_p", "gumbel"]


def test_stage_is_moved_by_its_order():
    stages = compose(["sampler.stages.top_p.order=750"]).sampler.stages
    assert [stage.key for stage in stages] == [*SHARED, "temperature", "top_p", "min_p", "top_k", "gumbel"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+engine.sed=1", r"engine\.sed: there is no such key\. Did you mean 'seed'\?"),
        ("sampler.temprature=1", r"sampler\.temprature: there is no such key\. Did you mean 'temperature'\?"),
        ("++scheduler.max_num_seq=1", r"scheduler\.max_num_seq: there is no such key\. Did you mean 'max_num_seqs'\?"),
        ("backend.device=3", r"backend\.device: there is no such key"),
        ("sampler.stages.min_p.floor=1", r"sampler\.stages\.min_p\.floor: there is no such key"),
        (
            "kv_cache.block_size=abc",
            r"kv_cache\.block_size: Value 'abc' of type 'str' could not be converted to Integer",
        ),
        ("kv_cache.block_size=1.5", r"kv_cache\.block_size: Value '1\.5' of type 'float' could not be converted"),
        ("scheduler.max_num_seqs=true", r"scheduler\.max_num_seqs: Value 'True' of type 'bool' could not be converted"),
        ("scheduler.chunked_prefill=maybe", r"scheduler\.chunked_prefill: Value 'maybe' is not a valid bool"),
        ("model.path=null", r"model\.path: Incompatible value 'None' for field of type 'str'"),
        ("kv_cache.num_blocks=1", r"kv_cache\.num_blocks=1 is too small\. Use 2 or more"),
        ("kv_cache.memory_fraction=1.5", r"kv_cache\.memory_fraction=1\.5 is outside of \(0, 1\]"),
        ("engine.dtype=float33", r"engine\.dtype=float33: there is no such choice\. Did you mean 'float32'\?"),
        ("sampler.logprobs_mode=raw", r"sampler\.logprobs_mode=raw: there is no such choice"),
        ("sampler.top_p=1.5", r"sampler\.top_p must be in \(0, 1\], got 1\.5"),
        ("sampler.stages.extra.order=5", r"sampler\.stages\.extra\.name=None must name a component"),
        ("sampler.stages.top_p.before=min", r"sampler\.stages\.top_p\.before=min: there is no stage 'min'"),
        ("sampler.stages.top_p.order=first", r"sampler\.stages\.top_p\.order='first' must be a number"),
        ("model.path=${engine.nope}", r"model\.path: Interpolation key 'engine\.nope' not found"),
        ("engine.seed=[1", r"engine\.seed=\[1: cannot be read"),
        ("engine.=3", r"engine\.=3: cannot be read\. A key is names joined by dots, as in engine\.seed=3"),
        ("sampler.stage.name=lost", r"stage 'lost' lacks the line .* Begin it with: # @package sampler\.stages\.lost"),
        ("sampler.stage.top_k.order=3", r"sampler\.stage: there is no such key\. Did you mean 'stages'\?"),
        ("kv_cache=3", r"kv_cache: must be a mapping"),
        ("policy=fcfs,priority", r"^policy=fcfs,priority: several values for one key\. Add --multirun"),
        (
            "sampler.seed=1,2",
            r"^sampler\.seed=1,2: several .* write sampler\.seed=\[1,2\] for a list, or sampler\.seed=\"'1,2'\" for a",
        ),
        ("sampler.temperature='", r"^sampler\.temperature=': a quote is not closed\. Close it, or write"),
        ("sampler.stop=it's", r"^sampler\.stop=it's: a quote is not closed\. .* write sampler\.stop=\"'TEXT'\" for a"),
        (
            "~sampler.top_p",
            r"^~sampler\.top_p: there is no value to delete\. Write sampler\.top_p=null to leave it unset",
        ),
        (
            "sampler.stages.min_q=null",
            r"^sampler\.stages\.min_q: .* has no stage 'min_q' to remove\. Did you mean 'min_p'\?",
        ),
        (
            "~sampler.stages.min_q",
            r"^sampler\.stages\.min_q: .* has no stage 'min_q' to remove\. Did you mean 'min_p'\?",
        ),
        ("sampler.stages.greedy=null", r"^sampler\.stages\.greedy: .* has no stage 'greedy' to remove\. Leave"),
    ],
)
def test_wrong_key_or_value_is_refused_in_one_line(word, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compose([word])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["kv_cache.dtype=float8_e4m3"])
def test_promised_value_is_refused_as_not_built(word):
    with pytest.raises(NotBuiltError, match=rf"{word} is not built yet"):
        compose([word])


@pytest.mark.parametrize(("word", "message"), [
    ("engine.load_format=ggu", r"loader=ggu: no installed plugin provides it\. Did you mean 'gguf'\?"),
    ("model.name=lama", r"model=lama: no installed plugin provides it\. Did you mean 'llama'\?"),
    ("sampler.stages.min_p.name=min_q", r"stage=min_q: no installed plugin provides it\. Did you mean 'min_p'\?"),
])  # fmt: skip
def test_component_that_is_not_there_is_refused_with_the_nearest(word, message):
    with pytest.raises(PluginError, match=message):
        compose([word])


def test_run_and_texts_come_beside_the_config(command_line):
    _, run, args = command_line("plugins", "some/target", "output=o.jsonl")
    assert run.name == "plugins"
    assert (args.target, args.output, args.prompt) == ("some/target", "o.jsonl", None)


def test_works_inside_another_hydra_program_and_leaves_it_alone(tmp_path):
    (tmp_path / "theirs.yaml").write_text("backend: theirs\n")
    with initialize_config_dir(version_base="1.2", config_dir=str(tmp_path)):
        assert compose(["backend=cpu"]).backend.name == "cpu"
        assert hydra_compose("theirs").backend == "theirs"
        assert str(VersionBase.instance().getbase()) == "1.2"
    assert not GlobalHydra.instance().is_initialized()


def test_hydras_global_state_is_untouched_in_a_fresh_process():
    program = """
from framework.config import compose
compose(["backend=cpu"]); compose(["sampler=greedy"])
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase, _UNSPECIFIED_
assert not GlobalHydra.instance().is_initialized() and HydraConfig.instance().cfg is None
assert VersionBase.instance().version_base is _UNSPECIFIED_
import sys; assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_composes_in_four_threads_at_once():
    sizes, errors = {}, []

    def work(size):
        try:
            sizes[size] = compose([f"scheduler.max_num_seqs={size}"]).scheduler.max_num_seqs
        except FrameworkError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sizes, errors) == ({1: 1, 2: 2, 3: 3, 4: 4}, [])


def test_config_is_built_by_hand_without_hydra():
    program = """
from framework.config import ComponentConfig, Config, EngineOptions
import framework.plugins, sys
Config(engine=EngineOptions(dtype="float32"), backend=ComponentConfig("cpu"))
framework.plugins.registry().spec("backend", "cpu")
assert not {"hydra", "omegaconf", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ranges_hold_for_a_config_built_by_hand():
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=1 is too small"):
        EngineOptions(max_model_len=1)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (EngineOptions, {"seed": True}, "engine.seed=True must be int or null, not bool"),
        (EngineOptions, {"max_model_len": 64.0}, "engine.max_model_len=64.0 must be int or null, not float"),
        (EngineOptions, {"max_model_len": "64"}, "engine.max_model_len='64' must be int or null, not str"),
        (EngineOptions, {"batch_invariant": 1}, "engine.batch_invariant=1 must be bool, not int"),
        (EngineOptions, {"async_scheduling": "no"}, "engine.async_scheduling='no' must be bool or null, not str"),
        (EngineOptions, {"load_format": None}, "engine.load_format=None must be str, not NoneType"),
        (KVCacheConfig, {"num_blocks": "8"}, "kv_cache.num_blocks='8' must be int or null, not str"),
        (KVCacheConfig, {"memory_fraction": "half"}, "kv_cache.memory_fraction='half' must be float or null, not str"),
        (SchedulerConfig, {"max_num_seqs": True}, "scheduler.max_num_seqs=True must be int, not bool"),
        (ModelConfig, {"path": 3}, "model.path=3 must be str, not int"),
        (SamplerConfig, {"stages": ["top_k"]}, "sampler.stages=['top_k'] must be tuple, not list"),
        (SamplerConfig, {"stages": ("top_k",)}, "sampler.stages='top_k' must hold StageConfigs"),
        (SamplerConfig, {"name": "mine"}, "sampler.name=mine needs its own stages"),
        (Config, {"backend": "cpu"}, "backend='cpu' must be ComponentConfig, not str"),
        (ComponentConfig, {"name": None}, "ComponentConfig.name=None must be str, not NoneType"),
    ],
)
def test_types_hold_for_a_config_built_by_hand(cls, values, message):
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    assert str(caught.value).startswith(message)


def test_integer_stands_for_a_number_in_a_config_built_by_hand():
    assert KVCacheConfig(memory_fraction=1).memory_fraction == 1


@dataclass(frozen=True)
class KnobOptions:
    """Options of the stage below."""

    size: int
    names: list[str]
    rate: float = 0.5


class KnobPlugin:
    """Announces a stage with options: stands in for a third party."""

    @hookimpl
    def framework_components(self):
        return [ComponentSpec("stage", "knob", "framework.request:Request", config="knob_module:KnobOptions")]


@pytest.fixture
def knob(monkeypatch):
    """A registry that has a stage `knob` with options."""
    module = type(sys)("knob_module")
    module.KnobOptions, module.plugin = KnobOptions, KnobPlugin()
    monkeypatch.setitem(sys.modules, "knob_module", module)
    ours = [ep for ep in entry_points_of("framework.plugins") if dist_name(ep) == "framework"]
    fresh = Registry.load([*ours, EntryPoint("knob", "knob_module:plugin", "framework.plugins")])
    monkeypatch.setattr(composing, "registry", lambda: fresh)
    return ["sampler.stages.knob.name=knob", "sampler.stages.knob.after=top_k"]


def test_options_hold_the_values_of_the_components_own_dataclass(knob):
    config = compose([*knob, "sampler.stages.knob.size=4", "sampler.stages.knob.names=[a]"])
    stage = config.sampler.stages[len(SHARED) + 3]
    assert stage == StageConfig("knob", "knob", {"size": 4, "names": ["a"], "rate": 0.5})
    options = composing.registry().build_options("stage", "knob", stage.options)
    assert options == KnobOptions(4, ["a"])


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("stage", "knob", {"sizes": 4}, r"stage=knob\.sizes: there is no such key\. Did you mean 'size'\?"),
        ("stage", "knob", {"size": 4}, r"stage=knob: .* missing 1 required positional argument: 'names'"),
        ("policy", "fcfs", {"x": 1}, r"policy=fcfs\.x: there is no such key\. Known: none"),
    ],
)
def test_options_written_by_hand_are_checked_when_a_component_is_built(knob, kind, name, options, message):
    with pytest.raises(ConfigError, match=message):
        composing.registry().build_options(kind, name, options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"sampler\.stages\.knob\.(size|names) needs a value"),
        (["sampler.stages.knob.sizes=1"], r"knob\.sizes: there is no such key\. Did you mean 'size'\?"),
        (["sampler.stages.knob.size=2.5"], r"sampler\.stages\.knob\.size: Value '2\.5'"),
        (["sampler.stages.knob.size=1", "sampler.stages.knob.names=a"], r"sampler\.stages\.knob\.names"),
    ],
)
def test_options_are_checked_with_the_components_own_dataclass(knob, words, message):
    with pytest.raises(ConfigError, match=message):
        compose([*knob, *words])
