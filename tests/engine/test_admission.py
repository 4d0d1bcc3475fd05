"""All of a batch or none of it, and what a refused request must not leave behind: an event, an arrival, a seed."""

import pytest

from framework import LLM, SamplingParams
from framework.errors import RequestError

WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=3", "engine.seed=7"]
WARM = SamplingParams(temperature=3.0, max_tokens=8, ignore_eos=True)
TOO_LONG = [4] * 40  # three blocks, and the pool has two


@pytest.fixture
def small(folder):
    with LLM(folder, overrides=WORDS) as made:
        yield made


def added(llm, monkeypatch):
    """Ids of the requests that observers see arrive."""
    seen = []
    emit = llm.engine.core.events.emit

    def watched(hook, *args):
        if hook == "on_request_added":
            seen.append(args[0].request_id)
        emit(hook, *args)

    monkeypatch.setattr(llm.engine.core.events, "emit", watched)
    return seen


def test_batch_that_the_scheduler_refuses_is_never_queued(small, monkeypatch):
    seen = added(small, monkeypatch)
    with pytest.raises(RequestError, match=r"prompt 1: .*3 blocks, but the pool has 2"):
        small.engine.add_requests(["a", "b"], [[4], TOO_LONG], [WARM, WARM])
    assert seen == []
    assert not small.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "a"], "prompt 1: request_id 'a' is already running"),
        (["a", "r"], "prompt 1: request_id 'r' is already running"),
        (["a", ""], "prompt 1: request_id must be a non-empty string, got ''"),
    ],
)
def test_batch_with_an_id_that_cannot_be_used_is_never_queued(small, monkeypatch, ids, message):
    small.engine.add_request("r", [4], WARM)
    seen = added(small, monkeypatch)
    with pytest.raises(RequestError, match=message):
        small.engine.add_requests(ids, [[4], [5]], [WARM, WARM])
    assert seen == []
    assert small.engine.is_running("r") and not small.engine.is_running("a")


def test_refused_requests_leave_the_seeds_of_the_others_as_they_are(folder):
    found = []
    for refused in (0, 3):
        with LLM(folder, overrides=WORDS) as llm:
            for _ in range(refused):
                with pytest.raises(RequestError):
                    llm.engine.add_request("a", TOO_LONG, WARM)
                with pytest.raises(RequestError):
                    llm.generate([[4], TOO_LONG], WARM)
            found.append([o.outputs[0].token_ids for o in llm.generate([[4], [4]], WARM)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
