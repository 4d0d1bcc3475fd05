"""Errors of plugins: named with plugin and distribution, ending only what they concern, in both modes of scheduling."""

import pickle

import pytest

from framework.config import (
    ComponentConfig,
    Config,
    EngineOptions,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
)
from framework.engine.build import build_engine
from framework.errors import PluginError, StageError
from framework.interfaces import Capabilities, StageSpec
from framework.plugins import ComponentSpec, Registry
from framework.request import SamplingParams
from framework.worker.executor import InprocessExecutor

KEEPS = frozenset({"async", "kept_set", "batch_invariant"})


class Bug:
    """What the parts of this file do next: raise in the method of this name."""

    method: str | None = None

    @classmethod
    def here(cls, method):
        if cls.method == method:
            raise ZeroDivisionError(f"in {method}")


class Fragile:
    """A mask stage that changes nothing, for requests that name it in extra_args."""

    spec = StageSpec("fragile", kind="mask", caps=Capabilities(keeps=KEEPS), extra_args=("on",))

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return bool(params.extra_args and "fragile" in params.extra_args)

    def validate(self, params):
        Bug.here("validate")

    def add_request(self, req_idx, params, request):
        if request.request_id == "d":
            Bug.here("add_request")

    def apply(self, logits, rows):
        Bug.here("apply")

    def commit(self, rows, sampled, num_valid):
        Bug.here("commit")


class FragileExecutor(InprocessExecutor):
    def execute(self, scheduled):
        Bug.here("execute")
        return super().execute(scheduled)


class FragileObserver:
    def on_request_added(self, request):
        Bug.here("on_request_added")

    def on_step_end(self, stats):
        Bug.here("on_step_end")

    def on_request_finished(self, request, output):
        Bug.here("on_request_finished")


PARTS = [
    ComponentSpec("stage", "fragile", f"{__name__}:Fragile"),
    ComponentSpec("executor", "fragile", f"{__name__}:FragileExecutor"),
    ComponentSpec("observer", "fragile", f"{__name__}:FragileObserver"),
]
STAGES = (StageConfig("fragile", "fragile"), StageConfig("gumbel", "gumbel"))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request, folder):
    plugins = Registry.load()
    plugins._announce("fragile", "acme", "1.2", PARTS)
    plugins.versions["acme"] = "1.2"
    config = Config(
        ModelConfig(path=str(folder)),
        EngineOptions(dtype="float32", max_model_len=64, async_scheduling=request.param, batch_invariant=True),
        KVCacheConfig(num_blocks=33),
        SchedulerConfig(max_num_seqs=4),
        SamplerConfig(name="fragile", stages=STAGES),
        executor=ComponentConfig("fragile"),
    )
    made = build_engine(config, plugins)
    yield made
    Bug.method = None
    made.close()


def params(fragile=False, **changes):
    extra_args = {"fragile": {"on": True}} if fragile else None
    return SamplingParams(seed=3, max_tokens=20, extra_args=extra_args, **changes)


def outputs_of(engine):
    found = {}
    while engine.has_unfinished_requests():
        found.update({o.request_id: o for o in engine.step()})
    return found


def assert_drained(engine):
    stats = engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def quiet_tokens(engine, names):
    for name in names:
        engine.add_request(name, [ord(name) % 20, 7], params())
    return {name: o.outputs[0].token_ids for name, o in outputs_of(engine).items()}


@pytest.mark.parametrize("method", ["apply", "commit"])
@pytest.mark.parametrize("steps", [0, 3])
def test_stage_that_raises_in_a_step_ends_the_requests_that_use_it_alone(engine, method, steps):
    quiet = quiet_tokens(engine, "abef")
    for name in "abcdef":  # four rows: e and f wait
        engine.add_request(name, [ord(name) % 20, 7], params(fragile=name in "cd"))
    for _ in range(steps):
        engine.step()
    Bug.method = method
    found = outputs_of(engine)
    assert {name: found[name].outputs[0].token_ids for name in quiet} == quiet
    for name in "cd":
        assert found[name].outputs[0].finish_reason == "error"
        assert found[name].error == (
            f"sampler stage 'fragile' (stage 'fragile' of acme 1.2) raised in {method}: ZeroDivisionError: in {method}"
        )
    assert_drained(engine)


def test_stage_that_raises_for_a_request_that_arrives_ends_that_request_alone(engine):
    quiet = quiet_tokens(engine, "abc")
    for name in "abc":
        engine.add_request(name, [ord(name) % 20, 7], params(fragile=name == "c"))
    engine.step()
    Bug.method = "add_request"
    engine.add_request("d", [5, 7], params(fragile=True))
    found = outputs_of(engine)
    assert found["d"].error.endswith("raised in add_request: ZeroDivisionError: in add_request")
    assert {name: found[name].outputs[0].token_ids for name in quiet} == quiet
    assert_drained(engine)


def test_stage_that_raises_at_validation_refuses_the_request_by_name(engine):
    Bug.method = "validate"
    with pytest.raises(PluginError, match=r"stage 'fragile' \(stage 'fragile' of acme 1\.2\) raised in validate: Zero"):
        engine.add_request("a", [4], params(fragile=True))
    assert not engine.has_unfinished_requests()


def test_executor_that_raises_is_named_and_what_waits_goes_on(engine):
    quiet = quiet_tokens(engine, "ef")
    for name in "abcdef":
        engine.add_request(name, [ord(name) % 20, 7], params())
    engine.step()
    Bug.method = "execute"
    with pytest.raises(
        PluginError, match=r"executor 'fragile' of acme 1\.2 raised ZeroDivisionError: in exec"
    ) as caught:
        outputs_of(engine)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    Bug.method = None
    found = outputs_of(engine)
    assert {name: found[name].outputs[0].token_ids for name in quiet} == quiet
    assert_drained(engine)


def test_error_of_ours_below_a_plugin_is_not_laid_at_its_door(engine, monkeypatch):
    executor = getattr(engine.core.executor, "_executor", engine.core.executor)
    assert isinstance(executor, FragileExecutor)
    engine.add_request("a", [4], params())
    with monkeypatch.context() as patch:
        patch.setattr(executor._runner.table, "_ops", None)  # our request table fails, in the executor's call
        with pytest.raises(AttributeError, match="NoneType"):
            engine.step()
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("event", ["on_request_added", "on_step_end", "on_request_finished"])
def test_observer_that_raises_is_named_and_dropped_and_nothing_else_ends(engine, caplog, event):
    Bug.method = event
    tokens = quiet_tokens(engine, "ab")
    assert [len(ids) for ids in tokens.values()] == [20, 20]
    records = [r.getMessage() for r in caplog.records if "observer" in r.getMessage()]
    assert records == [f"observer acme:fragile raised in {event} and is dropped"]


def test_stage_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(StageError("text", "bias", "7")))
    assert (str(error), error.stage, error.request_id) == ("text", "bias", "7")
