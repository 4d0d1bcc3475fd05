"""Requests that give nothing before their end hear of steps late, and end as if they had heard of each at its time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from framework import LLM, SamplingParams
from framework.engine import audience
from framework.engine.output import OutputState
from framework.request import OneEach
from framework.scheduler import Scheduler
from framework.testing.byte_model import save_byte_model
from framework.testing.crafted import save_crafted

VOCAB = 24
WORDS = ("engine.dtype=float32", "engine.batch_invariant=true", "engine.max_model_len=64", "kv_cache.block_size=4")
MODES = ("engine.async_scheduling=false", "engine.async_scheduling=true")
QUIET = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "own logprob": {"logprobs": 0},
    "listed": {"logprob_token_ids": [1, 2]},
    "n": {"n": 3},
    "n with logprobs": {"n": 2, "logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "stop id": {"stop_token_ids": [5]},
}
LOUD = {"delta": {"output_kind": "delta"}, "cumulative": {"output_kind": "cumulative", "logprobs": 1}}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    return save_crafted(tmp_path_factory.mktemp("audience") / "mixed", table)


@pytest.fixture(params=MODES, ids=["sync", "async"])
def mode(request):
    return request.param


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock: a second more whenever it is read. Other clocks are none of its metrics."""
    ticks = itertools.count()
    monkeypatch.setattr("framework.engine.engine.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def requests(wants, lengths=(30, 21, 26)):
    """[(prompt, params)]: of each kind one, which end at different steps."""
    return [
        (
            [1 + i, 2, 3],
            SamplingParams(temperature=0.8, seed=i, max_tokens=lengths[i % 3] + i, ignore_eos=True, detokenize=False,
                           **want),
        )
        for i, want in enumerate(wants)
    ]  # fmt: skip


def run(llm, made, between=lambda step: None):
    """{request id: its outputs}, in order; between: called before each step with its number."""
    engine, outputs = llm.engine, {str(i): [] for i in range(len(made))}
    for name, (prompt, params) in zip(outputs, made, strict=True):
        engine.add_request(name, prompt, params)
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            return outputs
        between(step)
        for output in engine.step():
            outputs[output.request_id].append(output)


def told(outputs):
    """All that the outputs of each request say, but when it was first scheduled."""
    return {
        name: [
            (
                [
                    (c.token_ids, c.finish_reason, c.stop_reason, c.cumulative_logprob, c.logprobs and list(c.logprobs))
                    for c in one.outputs
                ],
                one.prompt_logprobs and list(one.prompt_logprobs),
                (one.metrics.ttft, one.metrics.tpot, one.metrics.itl, one.metrics.e2e),
            )
            for one in several
        ]
        for name, several in outputs.items()
    }


class Heard:
    """Counts steps that states hear of late."""

    def __init__(self, monkeypatch):
        self.counts, hear = [], OutputState.hear

        def counted(state, rows, columns, moments, gaps):
            self.counts.append(len(moments))
            hear(state, rows, columns, moments, gaps)

        monkeypatch.setattr(OutputState, "hear", counted)


def tell_one_by_one(monkeypatch):
    """From here on tokens come as a list, as those of any other scheduler."""
    update = Scheduler.update
    monkeypatch.setattr(Scheduler, "update", lambda self, *step: list(update(self, *step)))


@pytest.mark.parametrize("most", [1, 7, 64])
@pytest.mark.parametrize("wants", [QUIET.values(), [*QUIET.values(), *LOUD.values()]], ids=["quiet", "and loud"])
def test_outputs_and_times_are_those_of_steps_told_one_by_one(mixed, mode, clock, monkeypatch, wants, most):
    monkeypatch.setattr(audience, "MAX_HEARD", most)
    heard, found = Heard(monkeypatch), []
    for goes_on in (True, False):
        if not goes_on:
            heard.counts.clear()
            tell_one_by_one(monkeypatch)
        with LLM(mixed, overrides=[*WORDS, mode]) as llm:
            found.append(told(run(llm, requests(wants))))
        assert bool(heard.counts) == goes_on
        assert all(count <= most for count in heard.counts)
    assert found[0] == found[1]
    if len(wants) > len(QUIET):
        assert len(found[0][str(len(QUIET))]) == 26 + 8  # a delta a token


def test_request_that_is_aborted_in_the_middle_has_the_tokens_of_all_steps_so_far(mixed, mode, clock, monkeypatch):
    heard, ended = Heard(monkeypatch), []
    with LLM(mixed, overrides=[*WORDS, mode]) as llm:
        expected = [outputs[-1].outputs[0] for outputs in run(llm, requests([{}, {"logprobs": 2}])).values()]
        heard.counts.clear()

        def abort(step):
            if step == 14:
                assert not heard.counts
                ended.extend(llm.engine.abort(name) for name in "01")

        run(llm, requests([{}, {"logprobs": 2}]), abort)
    (one,), (other,) = ended[0].outputs, ended[1].outputs
    for found, whole, output in zip((one, other), expected, ended, strict=True):
        assert found.token_ids == whole.token_ids[:14] and found.finish_reason == "abort"
        assert output.metrics.itl == [1.0] * 13
    assert list(other.logprobs) == list(expected[1].logprobs)[:14]
    own = [entry[token].logprob for entry, token in zip(other.logprobs, other.token_ids, strict=True)]
    assert other.cumulative_logprob == sum(own)


def test_stop_string_in_the_middle_ends_its_own_request_alone(tmp_path, mode, monkeypatch):
    folder, heard, found = save_byte_model(tmp_path), Heard(monkeypatch), []
    free = [("text", SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)) for seed in range(3)]
    with LLM(folder, overrides=[*WORDS, mode]) as llm:
        texts = [outputs[-1].outputs[0].text for outputs in run(llm, free).values()]
        made = [free[0], ("text", free[1][1].replace(stop=texts[1][12:14])), free[2]]
        for goes_on in (True, False):
            if not goes_on:
                tell_one_by_one(monkeypatch)
            heard.counts.clear()
            found.append([
                (o.text, o.token_ids, o.finish_reason, o.stop_reason)
                for outputs in run(llm, made).values() for o in outputs[-1].outputs
            ])  # fmt: skip
            assert bool(heard.counts) == goes_on
    assert found[0] == found[1]
    assert [reason for *_, reason, _ in found[0]] == ["length", "stop", "length"]
    assert [text for text, *_ in found[0]][::2] == texts[::2]


def test_steps_that_are_lost_in_the_middle_cost_nobody_a_token(mixed, mode, monkeypatch):
    heard, made = Heard(monkeypatch), requests([{}, {"logprobs": 2}, {"n": 2}])
    with LLM(mixed, overrides=[*WORDS, mode]) as llm:
        quiet = told(run(llm, made))

        def lose(step):
            if step in (9, 17):
                llm.engine.core.restart()
                llm.engine.core.drop_steps()

        heard.counts.clear()
        found = told(run(llm, made, lose))
        assert heard.counts and llm.engine.stats()["num_running"] == 0
    tokens = {name: [(outputs, prompt) for outputs, prompt, _ in several] for name, several in quiet.items()}
    assert {name: [(outputs, prompt) for outputs, prompt, _ in several] for name, several in found.items()} == tokens


def test_failed_step_in_the_middle_aborts_what_ran_and_the_engine_goes_on(mixed, monkeypatch):
    made = requests([{}, {"logprobs": 2}])
    with LLM(mixed, overrides=[*WORDS, MODES[0]]) as llm:
        quiet, model = told(run(llm, made)), llm.engine.core.executor._runner.model

        def fail(*args):
            raise RuntimeError("boom")

        def broken(step):
            if step == 12:
                monkeypatch.setattr(model, "forward", fail)

        with pytest.raises(RuntimeError, match="boom"):
            run(llm, made, broken)
        monkeypatch.undo()
        assert not llm.engine.has_unfinished_requests()
        again = told(run(llm, made))
    assert {name: several[0][:2] for name, several in again.items()} == {n: s[0][:2] for n, s in quiet.items()}


@pytest.mark.parametrize("look", ["stats", "nothing"])
def test_counters_that_are_asked_for_in_the_middle_change_nothing(mixed, mode, look):
    with LLM(mixed, overrides=[*WORDS, mode]) as llm:
        quiet = told(run(llm, requests(QUIET.values())))
        seen = []
        found = run(llm, requests(QUIET.values()), lambda step: look == "stats" and seen.append(llm.engine.stats()))
    assert {n: [o[:2] for o in s] for n, s in told(found).items()} == {n: [o[:2] for o in s] for n, s in quiet.items()}
    assert [s["num_running"] for s in seen[3:20]] == ([11] * 17 if look == "stats" else [])


class Watching:
    """Notes what requests say of themselves whenever it is called."""

    def __init__(self):
        self.requests, self.at_step_end, self.at_step = {}, [], []

    def on_request_added(self, request):
        self.requests[request.request_id] = request

    def on_step_end(self, stats):
        self.at_step_end.append({name: r.num_output_tokens for name, r in self.requests.items()})

    def on_step(self, scheduled, tokens, stats, counts):
        assert isinstance(tokens, list) and not isinstance(tokens, OneEach)
        own = {new.request.request_id: (new.token_ids, new.request.output_token_ids) for new in tokens}
        assert all(out[-len(new) :] == new for new, out in own.values() if new)
        self.at_step.append({name: r.num_output_tokens for name, r in self.requests.items()})


@pytest.mark.parametrize("event", ["on_step_end", "on_step"])
def test_observer_sees_requests_up_to_date_with_every_step(mixed, mode, event):
    with LLM(mixed, overrides=[*WORDS, mode]) as llm:
        watching, core = Watching(), llm.engine.core
        methods = {name: getattr(watching, name) for name in ["on_request_added", event]}
        core.events = core.events.joined("watching", SimpleNamespace(**methods, close=lambda: None))
        run(llm, requests([{}, {"logprobs": 1}]))
    seen = watching.at_step_end or watching.at_step
    assert seen[:20] == [{"0": count, "1": count} for count in range(1, 21)]
