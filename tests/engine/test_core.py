"""Steps ahead of the one that runs: the tokens of a step at a time, and nothing kept when all requests are done."""

import random
import threading

import pytest
import torch

from framework import LLM, SamplingParams
from framework.errors import ConfigError
from framework.testing.crafted import save_crafted

VOCAB = 24
SYNC, ASYNC = "engine.async_scheduling=false", "engine.async_scheduling=true"
WORDS = ("engine.dtype=float32", "engine.batch_invariant=true", "engine.max_model_len=64", "kv_cache.block_size=4")
TIGHT = (*WORDS, "kv_cache.num_blocks=18", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=8")
EOS = 3


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Logits without ties, eos among the likely tokens."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    return save_crafted(tmp_path_factory.mktemp("core") / "mixed", table, eos_token_id=EOS)


def requests(count, seed):
    """[(prompt ids, params)]: greedy and seeded ones, endings by eos, stop id and length."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 20))]
        made.append((prompt, SamplingParams(
            temperature=rng.choice([0.0, 1.0, 2.0]), seed=i, max_tokens=rng.randint(1, 30),
            ignore_eos=rng.random() < 0.5, stop_token_ids=[5] if rng.random() < 0.3 else None,
            logprobs=rng.choice([None, 2]), n=rng.choice([1, 1, 3]),
        )))  # fmt: skip
    return made


def run(llm, made, aborts=()):
    """{request id: last output}; aborts: [(after this step, request id)]. Requests arrive over the first steps."""
    engine, done, waiting, step = llm.engine, {}, list(enumerate(made)), 0
    while waiting or engine.has_unfinished_requests():
        for index, (prompt, params) in waiting[:3]:
            engine.add_request(str(index), prompt, params)
        del waiting[:3]
        outputs = engine.step()
        step += 1
        outputs += [o for at, name in aborts if at == step and (o := engine.abort(name)) is not None]
        done.update({o.request_id: o for o in outputs if o.finished})
    return done


def assert_drained(llm):
    stats = llm.engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def told(output):
    return [
        (c.token_ids, c.finish_reason, c.stop_reason, None if c.logprobs is None else list(c.logprobs))
        for c in output.outputs
    ]


@pytest.mark.parametrize("caching", ["true", "false"])
@pytest.mark.parametrize("seed", range(3))
def test_steps_in_flight_change_no_token_under_preemption_and_chunks(mixed, seed, caching):
    made, found = requests(14, seed), {}
    for mode in (SYNC, ASYNC):
        with LLM(mixed, overrides=[*TIGHT, f"kv_cache.prefix_caching={caching}", mode]) as llm:
            found[mode] = {name: told(output) for name, output in run(llm, made).items()}
            assert llm.engine.stats()["num_preemptions"] > 0
            assert_drained(llm)
    assert found[SYNC] == found[ASYNC]
    assert len(found[ASYNC]) == len(made)


@pytest.mark.parametrize("seed", range(3))
def test_abort_with_steps_in_flight_leaves_the_others_their_tokens(mixed, seed):
    made, rng = requests(10, seed), random.Random(seed)
    aborts = [(rng.randint(1, 12), str(i)) for i in rng.sample(range(10), 4)]
    with LLM(mixed, overrides=[*TIGHT, SYNC]) as llm:
        quiet = {name: told(output) for name, output in run(llm, made).items()}
    with LLM(mixed, overrides=[*TIGHT, ASYNC]) as llm:
        outputs = run(llm, made, aborts)
        assert_drained(llm)
    assert len(outputs) == len(made)
    for name, output in outputs.items():
        for (tokens, reason, *rest), expected in zip(told(output), quiet[name], strict=True):
            if reason == "abort":
                assert name in {name for _, name in aborts} and tokens == expected[0][: len(tokens)]
            else:
                assert (tokens, reason, *rest) == expected


def test_two_steps_are_in_flight_and_text_is_made_on_a_thread_of_its_own(mixed, monkeypatch):
    from framework.engine.output import OutputState

    threads, most = {"add": set(), "execute": set()}, []
    add = OutputState.add

    def spied(self, *args):
        threads["add"].add(threading.current_thread().name)
        return add(self, *args)

    monkeypatch.setattr(OutputState, "add", spied)
    with LLM(mixed, overrides=[*WORDS, ASYNC]) as llm:
        core, runner = llm.engine.core, llm.engine.core.executor._executor._runner
        update, forward = core.scheduler.update, runner.model.forward

        def updated(*args):
            most.append(len(core._in_flight))
            return update(*args)

        def forwarded(*args):
            threads["execute"].add(threading.current_thread().name)
            return forward(*args)

        monkeypatch.setattr(core.scheduler, "update", updated)
        monkeypatch.setattr(runner.model, "forward", forwarded)
        llm.generate([[4], [6]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert max(most) == 2
    assert threads == {"add": {"framework-output"}, "execute": {"framework-step"}}


def test_automatic_choice_on_the_cpu_is_a_step_at_a_time_and_says_why(mixed):
    for words, expected in (((), (False, "by itself")), ((ASYNC,), (True, "as engine.async_scheduling says"))):
        with LLM(mixed, overrides=[*WORDS, *words]) as llm:
            facts = llm.engine.facts
        assert facts["async_scheduling"] is expected[0] and facts["why_async"].endswith(expected[1])


def test_stage_that_needs_tokens_on_the_host_is_refused_with_async_scheduling(mixed):
    from framework.config import Config, EngineOptions, ModelConfig, SamplerConfig, StageConfig
    from framework.engine.build import build_engine
    from framework.plugins import ComponentSpec, Registry

    plugins = Registry.load()
    plugins._announce("tests", "tests", "1", [ComponentSpec("stage", "late", f"{__name__}:NeedsHostTokens")])
    sampler = SamplerConfig(name="late", stages=(StageConfig("late", "late"), StageConfig("greedy", "greedy")))
    for is_async in (False, True):
        config = Config(
            ModelConfig(path=str(mixed)),
            EngineOptions(dtype="float32", max_model_len=32, async_scheduling=is_async),
            sampler=sampler,
        )
        if is_async:
            with pytest.raises(ConfigError, match=r"stage 'late' .*(host_tokens|async)"):
                build_engine(config, plugins)
        else:
            build_engine(config, plugins).close()


class NeedsHostTokens:
    from framework.interfaces import Capabilities, StageSpec

    spec = StageSpec("late", kind="mask", caps=Capabilities(needs=frozenset({"host_tokens"})))

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return False

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        pass

    def apply(self, logits, rows):
        pass

    def commit(self, rows, sampled, num_valid):
        pass
