"""What goes wrong in the engine is told to whom it concerns, and to nobody else."""

import threading

import pytest

from .here import events_of, serving

# The second 6 is banned and nothing else is allowed: the row is emptied after one token.
EMPTIED = {"prompt": "w5", "temperature": 0, "max_tokens": 5, "allowed_token_ids": [6], "bad_words_token_ids": [[6, 6]]}
SOUND = {"prompt": "w5", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


def test_request_that_the_engine_ends_is_500_with_its_text(here):
    response = here.complete(**EMPTIED)
    error = response.json()["error"]
    assert response.status_code == 500 and error["type"] == "server_error" and error["code"] == "engine_error"
    assert "bad_words" in error["message"] or "mask" in error["message"], error["message"]
    here.wait_until_idle()


def test_stream_that_the_engine_ends_closes_with_the_error(here):
    events = events_of(here.complete(stream=True, **EMPTIED).text)
    assert events[0]["choices"][0]["text"] == "w6"
    assert events[-1]["error"]["code"] == "engine_error"
    here.wait_until_idle()


def test_neighbours_of_an_ended_request_go_on(here):
    alone = here.complete(**SOUND).json()["choices"][0]["text"]
    found = []
    thread = threading.Thread(target=lambda: found.append(here.complete(**SOUND).json()["choices"][0]["text"]))
    thread.start()
    here.wait_until(lambda stats: stats["num_running"] == 1)
    assert here.complete(**EMPTIED).status_code == 500
    thread.join()
    assert found == [alone]


@pytest.fixture
def broken(chain):
    """A server of its own, for tests that break the engine."""
    with serving(chain) as running:
        yield running


def test_step_that_fails_is_500_and_the_next_request_is_served(broken, monkeypatch):
    engine, steps = broken.service.llm._engine, []
    step = engine.core.step

    def third_fails():
        steps.append(1)
        if len(steps) == 3:  # by then the request runs
            raise RuntimeError("no more tape")
        return step()

    monkeypatch.setattr(engine.core, "step", third_fails)
    response = broken.complete(**SOUND)
    assert response.status_code == 500 and "no more tape" in response.json()["error"]["message"]
    assert broken.complete(prompt="w5", temperature=0, max_tokens=2).json()["choices"][0]["text"] == "w6 w7"


def test_health_tells_of_an_engine_that_has_stopped(broken, monkeypatch):
    monkeypatch.setattr(broken.service.llm._engine, "_broken", RuntimeError("lost its blocks"))
    health = broken.client.get("/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == "engine_error"
    refused = broken.complete(prompt="w5")
    assert refused.status_code == 500 and "lost its blocks" in refused.json()["error"]["message"]
