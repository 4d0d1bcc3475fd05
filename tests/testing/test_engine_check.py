"""The check that runs a stage in real engines: who hears of them, and what it says of a stage that raises there."""

import pytest

from framework.plugins import registry
from framework.testing.checking import run_check
from framework.testing.stage_engine import check_engine_gives_equal_tokens
from framework.testing.stages import StageCase

from .sound_stages import Counting, NotTwice, paying


class Heard:
    def __init__(self):
        self.count = 0

    def on_request_added(self, request):
        self.count += 1

    def close(self):
        pass


def test_observers_that_are_installed_do_not_hear_of_engines_of_a_check(monkeypatch):
    heard = Heard()
    plugins = registry()
    monkeypatch.setattr(plugins, "_events", plugins.events.joined("heard", heard))
    check_engine_gives_equal_tokens(StageCase(NotTwice, paying("not_twice", 1.0, 2.0)))
    assert heard.count == 0


class RaisesInAStep(Counting):
    def commit(self, rows, sampled, num_valid):
        raise RuntimeError("out of cheese")


def test_stage_that_raises_in_an_engine_is_named_with_what_it_raised(caplog):
    outcome = run_check(check_engine_gives_equal_tokens, StageCase(RaisesInAStep, paying("counting", 0.5, 2.0)))
    assert outcome.reason.startswith("counting: request 0 ends with an error: sampler stage 'counting'")
    assert outcome.reason.endswith("raised in commit: RuntimeError: out of cheese")


class PreemptedOnesForget(Counting):
    def add_request(self, req_idx, params, request):
        self.rate.np[req_idx] = params.extra_args["counting"]["rate"]
        self.counts.take(req_idx)


def test_stage_that_forgets_outputs_gives_other_tokens_when_preempted():
    with pytest.raises(AssertionError, match=r"counting: request \d gives .* preempted, and .* alone"):
        check_engine_gives_equal_tokens(StageCase(PreemptedOnesForget, paying("counting", 5.0, 10.0)))
