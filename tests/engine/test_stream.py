"""`generate(stream=True)`: outputs as they are made, and nothing left behind however the iteration ends."""

import gc
import signal
import threading

import pytest

from framework import LLM, SamplingParams
from framework.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=40)
MODES = ("false", "true")


@pytest.fixture(scope="module", params=MODES, ids=("sync", "async"))
def shared(request, folder):
    words = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=2", "kv_cache.num_blocks=17"]
    with LLM(folder, overrides=[*words, f"engine.async_scheduling={request.param}"]) as made:
        yield made


@pytest.fixture
def llm(shared):
    """The engine, which every test leaves empty."""
    yield shared
    assert not shared.engine.has_unfinished_requests()
    stats = shared.engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def test_stream_is_cumulative_unless_the_parameters_name_a_kind(llm):
    assert ids_of(llm.generate([4], GREEDY, stream=True)) == [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert ids_of(llm.generate([4], GREEDY.replace(output_kind="delta"), stream=True)) == [[5], [6], [7], [8]]
    assert ids_of(llm.generate([4], GREEDY.replace(output_kind="final"), stream=True)) == [[5, 6, 7, 8]]


def test_stream_of_several_prompts_has_the_outputs_of_the_plain_call(llm):
    prompts, params = [[4], [5, 6], [7], [8]], [GREEDY, LONG, GREEDY, GREEDY]
    plain = llm.generate(prompts, params, use_tqdm=False)
    last = {o.request_id: o for o in llm.generate(prompts, params, stream=True) if o.finished}
    assert [last[i].outputs[0].token_ids for i in sorted(last, key=int)] == ids_of(plain)
    assert list(llm.generate([], stream=True)) == []


def test_default_parameters_stream_too(llm):
    outputs = list(llm.generate([4], stream=True))
    assert len(outputs) == 16 and outputs[-1].finished


def test_prompts_are_checked_before_a_stream_is_returned(llm):
    with pytest.raises(RequestError, match=r"prompt 1: .* outside the vocabulary"):
        llm.generate([[4], [999]], GREEDY, stream=True)
    with pytest.raises(ValueError, match=r"use_tqdm=True .* leave it out with stream=True"):
        llm.generate([4], GREEDY, stream=True, use_tqdm=True)


def test_stream_that_is_left_early_aborts_its_requests(llm):
    with llm.generate([[4], [5], [6]], LONG, stream=True) as stream:
        assert next(stream).outputs[0].token_ids == [5]
    assert list(stream) == []
    for _ in llm.generate([4], LONG, stream=True):
        break  # the stream is nobody's from here on
    gc.collect()


def test_stream_that_is_never_read_aborts_its_requests(llm):
    llm.generate([[4], [5]], LONG, stream=True)
    gc.collect()


def test_streams_and_plain_calls_may_be_mixed(llm):
    first = llm.generate([4], GREEDY, stream=True)
    second = llm.generate([8], GREEDY, stream=True)
    found = [next(first), next(second), next(second)]
    assert ids_of(found) == [[5], [9], [9, 10]]
    assert ids_of(llm.generate([12], GREEDY, use_tqdm=False)) == [[13, 14, 15, 16]]
    assert ids_of(first) == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert ids_of(second) == [[9, 10, 11], [9, 10, 11, 12]]


def test_threads_stream_at_the_same_time(llm):
    found = {}

    def work(start):
        found[start] = [o.outputs[0].token_ids for o in llm.generate([start], LONG, stream=True)][-1]

    threads = [threading.Thread(target=work, args=(start,)) for start in (2, 6, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {start: [(start + i) % 20 for i in range(1, 41)] for start in (2, 6, 10)}


def test_interrupt_stops_the_stream_and_aborts_its_requests(llm, monkeypatch):
    seen, signals, step = [], [signal.SIGINT], llm.engine.core.step

    def interrupted():
        if len(seen) == 2 and signals:
            signal.raise_signal(signals.pop())
        return step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.core, "step", interrupted)
        for output in llm.generate([4], LONG, stream=True):
            seen.append(output)
    assert len(seen) == 2


def test_failed_step_ends_the_stream_with_its_cause(llm, monkeypatch):
    stream = llm.generate([4], LONG, stream=True)
    next(stream)

    def fail(*args):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.scheduler, "schedule", fail)
        with pytest.raises(RuntimeError, match="boom"):
            list(stream)
    assert list(stream) == []


def test_stream_says_so_when_its_requests_are_aborted_from_elsewhere(llm):
    stream = llm.generate([4], LONG, stream=True)
    next(stream)
    llm.engine.abort(next(iter(llm.engine._states)))
    with pytest.raises(RuntimeError, match="1 requests of this stream were aborted from elsewhere"):
        list(stream)


def test_stream_of_a_closed_llm_says_so(folder):
    llm = LLM(folder, overrides=["engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=17"])
    stream = llm.generate([4], LONG, stream=True)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(stream)
    assert list(stream) == []
