"""What is left after a step that failed, an interrupt or an abort: an engine that goes on, or one that says why not."""

import _thread
import signal
import threading

import pytest

from framework import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3)
LONG = SamplingParams(temperature=0, max_tokens=40)


def tokens(llm, prompts, params=GREEDY):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def assert_usable_and_empty(llm):
    assert not llm.engine.has_unfinished_requests()
    assert tokens(llm, [[4], [5], [6]]) == [[5, 6, 7], [6, 7, 8], [7, 8, 9]]
    stats = llm.engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def once(function, number, error):
    """`function`, raising `error` at its call of this number."""
    calls = []

    def raising(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise error
        return function(*args, **kwargs)

    return raising


PLACES = {
    "model": lambda llm: (llm.engine.core.executor._runner.model, "forward"),
    "rows": lambda llm: (llm.engine.core.executor._runner.table, "append_blocks"),
    "sampler": lambda llm: (llm.engine.core.executor._runner.pipeline, "sample"),
    "execute": lambda llm: (llm.engine.core.executor, "execute"),
    "schedule": lambda llm: (llm.engine.core.scheduler, "schedule"),
    "observer": lambda llm: (llm.engine.core.events, "emit"),
}


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_failed_step_raises_its_cause_and_the_engine_goes_on(llm, monkeypatch, place, number, error):
    owner, name = PLACES[place](llm)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, once(getattr(owner, name), number, error))
        with pytest.raises(type(error)):
            llm.generate([[4] * 20, [5], [6]], LONG, use_tqdm=False)
    assert_usable_and_empty(llm)


def test_failed_step_ends_what_ran_and_leaves_what_waits(llm, monkeypatch):
    for name in ("a", "b", "c"):  # two rows: c waits
        llm.engine.add_request(name, [4], GREEDY)
    llm.engine.step()
    runner = llm.engine.core.executor._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", once(runner.model.forward, 1, RuntimeError("boom")))
        with pytest.raises(RuntimeError, match="boom"):
            llm.engine.step()
    ended = []
    while llm.engine.has_unfinished_requests():
        ended += llm.engine.step()
    assert [(o.request_id, o.outputs[0].token_ids) for o in ended] == [("c", [5, 6, 7])]


def test_engine_that_cannot_recover_says_what_failed(llm, monkeypatch):
    scheduler = llm.engine.core.scheduler

    def broken(*args):
        raise ValueError("ledger out of step")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "update", broken)
        with pytest.raises(ValueError, match="ledger out of step"):
            llm.generate([[4]], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match=r"stopped when a step failed .*ledger out of step.*make another one"):
        llm.generate([[4]], GREEDY)
    with pytest.raises(RuntimeError, match="stopped when a step failed"):
        llm.engine.step()


def test_interrupt_takes_effect_between_steps_and_aborts_the_call(llm, monkeypatch):
    steps = []
    step = llm.engine.core.step

    def interrupted():
        steps.append("begin")
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        tokens = step()
        steps.append("end")
        return tokens

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4], [5], [6]], LONG)
    assert steps == ["begin", "end", "begin", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_usable_and_empty(llm)


def test_second_interrupt_is_not_held_back(llm, monkeypatch):
    def hanging():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt was held back")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", hanging)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4]], LONG)
    assert_usable_and_empty(llm)


def test_interrupt_after_the_last_step_is_not_lost(llm, monkeypatch):
    step = llm.engine.core.step

    def last():
        _thread.interrupt_main()
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", last)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4]], SamplingParams(temperature=0, max_tokens=1))
    assert_usable_and_empty(llm)


def test_handler_of_the_program_around_is_kept(llm):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        mine = signal.getsignal(signal.SIGINT)
        tokens(llm, [[4]])
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_ends_a_waiting_or_running_request_alone(llm, steps):
    for name in ("a", "b", "c"):
        llm.engine.add_request(name, [4], SamplingParams(temperature=0, max_tokens=5))
    for _ in range(steps):
        llm.engine.step()
    for name in ("a", "c"):  # with two rows, c waits
        ended = llm.engine.abort(name)
        assert (ended.finished, ended.outputs[0].finish_reason) == (True, "abort")
        assert ended.outputs[0].token_ids == ([5, 6, 7][:steps] if name == "a" else [])
        assert llm.engine.abort(name) is None
    rest = []
    while llm.engine.has_unfinished_requests():
        rest += llm.engine.step()
    assert [(o.request_id, o.outputs[0].token_ids) for o in rest] == [("b", [5, 6, 7, 8, 9])]
    assert_usable_and_empty(llm)


def test_generate_leaves_requests_of_the_engine_to_their_owner(llm):
    llm.engine.add_request("0", [10], GREEDY)
    assert tokens(llm, [[4], [5]]) == [[5, 6, 7], [6, 7, 8]]
    ended = []
    while llm.engine.has_unfinished_requests():
        ended += llm.engine.step()
    assert [(o.request_id, o.outputs[0].token_ids) for o in ended] == [("0", [11, 12, 13])]


def test_generate_says_so_when_its_requests_are_aborted_from_elsewhere(llm, monkeypatch):
    step = llm.engine.core.step

    def aborting():
        for request_id in list(llm.engine._states):
            llm.engine.abort(request_id)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", aborting)
        with pytest.raises(RuntimeError, match="2 requests of this call were aborted from elsewhere"):
            llm.generate([[4], [5]], LONG)
    assert_usable_and_empty(llm)


def test_threads_that_share_an_llm_take_turns(llm):
    found = {}

    def work(start):
        found[start] = [tokens(llm, [[start], [start + 1]]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(start,)) for start in (2, 6, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = {s: [[[s + 1, s + 2, s + 3], [s + 2, s + 3, s + 4]]] * 4 for s in (2, 6, 10)}
    assert found == expected
    assert_usable_and_empty(llm)


def test_closed_llm_says_so_and_closes_twice(folder, llm):
    llm.engine.add_request("a", [4], LONG)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[4]], GREEDY), lambda: llm.chat([]), lambda: llm.engine):
        with pytest.raises(RuntimeError, match="this LLM is closed; make another one"):
            call()
