"""What an observe stage collects is in the output of the step."""

from framework.config import Config, EngineOptions, ModelConfig, SamplerConfig, StageConfig
from framework.engine.build import build_engine
from framework.interfaces import StageSpec
from framework.plugins import ComponentSpec, Registry
from framework.request import SamplingParams


class Watch:
    """Observes the number of rows of a step."""

    spec = StageSpec("watch", kind="observe")

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return params.seed == 1

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def observe(self, raw_logits, processed, rows, ids):
        return len(ids)

    def collect(self, payload):
        return f"{payload} rows"

    def commit(self, rows, sampled, num_valid):
        pass


def test_payload_of_an_observe_stage_is_in_the_steps_output(folder):
    plugins = Registry.load()
    plugins._announce("tests", "tests", "1", [ComponentSpec("stage", "watch", f"{__name__}:Watch")])
    sampler = SamplerConfig(name="watched", stages=(StageConfig("greedy", "greedy"), StageConfig("watch", "watch")))
    config = Config(ModelConfig(path=str(folder)), EngineOptions(dtype="float32", max_model_len=32), sampler=sampler)
    engine = build_engine(config, plugins)
    engine.add_request("a", [4], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.core.last_output.payloads == {}
    engine.add_request("b", [4], SamplingParams(max_tokens=2, seed=1))
    engine.step()
    assert engine.core.last_output.payloads == {"watch": "2 rows"}
    engine.close()


class TooFew(Watch):
    """Tells one row whatever there are."""

    spec = StageSpec("too_few", kind="observe", tells_requests=True)

    def collect(self, payload):
        return ["one"]


def test_a_stage_that_tells_requests_too_little_ends_the_requests_that_want_the_stage(folder):
    plugins = Registry.load()
    plugins._announce("tests", "tests", "1", [ComponentSpec("stage", "too_few", f"{__name__}:TooFew")])
    sampler = SamplerConfig(name="watched", stages=(StageConfig("greedy", "greedy"), StageConfig("few", "too_few")))
    config = Config(ModelConfig(path=str(folder)), EngineOptions(dtype="float32", max_model_len=32), sampler=sampler)
    engine = build_engine(config, plugins)
    for request_id, seed in (("a", 1), ("b", None)):
        engine.add_request(request_id, [4], SamplingParams(max_tokens=2, seed=seed))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {out.request_id: out for out in engine.step()}
    engine.close()
    assert outputs["a"].error == (
        "sampler stage 'few' tells requests, so its collect must return a list of 2 entries, one a logits row,"
        " and got ['one']"
    )
    assert len(outputs["b"].outputs[0].token_ids) == 2 and outputs["b"].error is None
