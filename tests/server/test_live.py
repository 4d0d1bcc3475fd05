"""The live feed: frames say what the engine's own counters say, come seldom, and cost nothing where nobody listens."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
torch = pytest.importorskip("torch")

from fastapi import FastAPI  # noqa: E402

from framework import LLM, AsyncLLM, SamplingParams  # noqa: E402
from framework.server import errors, live  # noqa: E402
from framework.server.service import Service  # noqa: E402
from framework.testing.crafted import save_crafted  # noqa: E402
from framework.testing.served import Served  # noqa: E402

VOCAB = 20
GREEDY = SamplingParams(temperature=0, max_tokens=4)
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=2", "kv_cache.num_blocks=17"]
TIMEOUT_S = 60  # nothing comes near it: it turns a hang into a failure


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return save_crafted(tmp_path_factory.mktemp("live") / "chain", table)


@pytest.fixture
def llm(folder):
    with AsyncLLM(folder, overrides=WORDS) as made:
        yield made


@pytest.fixture
def service(llm):
    return Service(llm, config=None, model_name="chain", created=0)


@pytest.fixture
def watched(folder):
    """An engine that is stepped by hand, and what watches it."""
    words = [*WORDS, "scheduler.max_num_batched_tokens=16"]
    with LLM(folder, overrides=words) as made:
        watch = live.RequestWatch()
        made.engine.observe("live", watch)
        yield made.engine, watch


def rows_of(watch, engine):
    frame = watch.frame(engine)
    return [dict(zip(frame["columns"], row, strict=True)) for row in frame["rows"]]


@contextmanager
def served(service):
    """The routes at an address of this machine, in a thread of its own."""
    app = FastAPI()
    errors.install(app)
    app.include_router(live.routes(service))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        until = time.monotonic() + TIMEOUT_S
        while not server.started and time.monotonic() < until:  # what ends before that, nobody has watched
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)


def events(response):
    """(event, value) of a stream, one after the other."""
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def finish(engine):
    while engine.has_unfinished_requests():
        engine.step()


async def generate(llm, prompt):
    return [output async for output in llm.generate(prompt, GREEDY)]


def run(main):
    return asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


# ---------------------------------------------------------------------------------------------------------- the watch


def test_row_shows_how_far_a_request_is(watched):
    engine, watch = watched
    engine.add_request("a", [i % VOCAB for i in range(40)], SamplingParams(temperature=0, max_tokens=4))
    assert rows_of(watch, engine)[0]["phase"] == "waiting"
    engine.step()
    (row,) = rows_of(watch, engine)
    del row["age_s"]
    assert row == {
        "id": "a", "phase": "prefill", "prompt": 40, "computed": 16, "output": 0, "limit": 44, "blocks": 3, "cached": 0,
        "preemptions": 0,
    }  # fmt: skip
    engine.step()
    engine.step()
    (row,) = rows_of(watch, engine)
    assert (row["phase"], row["computed"], row["output"], row["blocks"]) == ("decode", 40, 1, 3)
    finish(engine)
    assert rows_of(watch, engine) == []


def test_running_requests_stand_before_waiting_ones_and_siblings_are_rows_of_their_own(watched):
    engine, watch = watched
    for name in ("a", "b", "c"):
        engine.add_request(name, [1], SamplingParams(temperature=0, max_tokens=9, n=2 if name == "a" else 1))
    engine.step()
    rows = rows_of(watch, engine)
    assert [row["phase"] for row in rows] == ["decode", "decode", "waiting", "waiting"]
    assert len({row["id"] for row in rows}) == 4


def test_frame_counts_the_rows_that_it_leaves_off(watched, monkeypatch):
    monkeypatch.setattr(live, "MAX_ROWS", 2)
    engine, watch = watched
    for name in "abc":
        engine.add_request(name, [1], GREEDY)
    frame = watch.frame(engine)
    assert (len(frame["rows"]), frame["num_left_off"]) == (2, 1)


def test_ended_request_is_told_with_its_times_and_its_reason(watched):
    engine, watch = watched
    engine.add_request("a", [1, 2, 3], GREEDY)
    finish(engine)
    (ended,) = watch.frame(engine)["ended"]
    assert (ended["id"], ended["prompt"], ended["output"], ended["reason"]) == ("a", 3, 4, "length")
    assert 0 < ended["ttft_s"] < ended["e2e_s"] and 0 < ended["tpot_s"] < ended["e2e_s"]


def test_aborted_request_ends_without_times_of_tokens(watched):
    engine, watch = watched
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.abort("a")
    (ended,) = watch.frame(engine)["ended"]
    assert (ended["reason"], ended["output"], ended["ttft_s"], ended["tpot_s"]) == ("abort", 0, None, None)


def test_last_step_and_counters_are_those_of_the_engine(watched):
    engine, watch = watched
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    frame = watch.frame(engine)
    assert frame["stats"] == engine.stats()
    assert (frame["step"]["num_rows"], frame["step"]["num_prompt_tokens"], frame["step"]["num_output_tokens"]) == (
        1,
        3,
        1,
    )
    assert frame["step"]["seconds"].keys() == engine.stats()["step_seconds"].keys()


def test_steps_of_a_watched_engine_call_nobody(watched):
    engine, _ = watched
    assert not engine.core.events.has("on_step", "on_step_end")


# ----------------------------------------------------------------------------------------------------------- the feed


def test_events_over_http_say_what_stats_say(service, llm):
    with served(service) as url, httpx.stream("GET", f"{url}/live/events", timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        run(generate(llm, [1, 2, 3]))
        frames = (value for name, value in events(response) if name == "frame")
        frame = next(value for value in frames if value["num_ended"])
        assert frame["stats"] == run(llm.stats())
        assert (frame["stats"]["prefill_tokens"], frame["stats"]["decode_tokens"]) == (3, 4)


def test_who_comes_later_hears_of_requests_that_ended_before(service, llm):
    with served(service) as url:
        run(generate(llm, [1, 2, 3]))
        with httpx.stream("GET", f"{url}/live/events", timeout=TIMEOUT_S) as response:
            name, value = next(events(response))
    assert (name, [one["prompt"] for one in value["ended"]]) == ("history", [3])


def test_listeners_share_at_most_four_frames_a_second(service):
    async def main():
        feed = live.Feed(service)
        await feed.start()
        first, second = feed.events(), feed.events()
        start, frames = time.monotonic(), []
        for _ in range(4):  # the history, then three frames
            frames.append(await asyncio.gather(anext(first), anext(second)))
        return time.monotonic() - start, frames[1:]

    seconds, frames = run(main())
    assert seconds >= 2 / live.FRAMES_PER_S
    assert all(one == other for one, other in frames)


def test_slow_listener_skips_frames_and_holds_nobody_up(service):
    async def main():
        feed = live.Feed(service)
        await feed.start()
        slow, quick = feed.events(), feed.events()
        seen = [await anext(slow), await anext(slow)]
        others = [await anext(quick) for _ in range(5)]
        seen.append(await anext(slow))
        return seen, others

    seen, others = run(main())
    assert len(set(others[1:])) == 4
    assert seen[-1] == others[-1]


def test_no_frame_is_made_while_nobody_listens(service):
    async def main():
        feed = live.Feed(service)
        await feed.start()
        listener = feed.events()
        for _ in range(2):
            await anext(listener)
        await listener.aclose()
        before = feed._number
        await asyncio.sleep(2.5 / live.FRAMES_PER_S)
        return feed.num_listeners, feed._number - before

    assert run(main()) == (0, 0)


def test_listener_beyond_the_limit_is_refused_until_another_one_leaves(service, monkeypatch):
    monkeypatch.setattr(live, "MAX_LISTENERS", 1)
    with served(service) as url, httpx.Client(timeout=TIMEOUT_S) as client:
        with client.stream("GET", f"{url}/live/events") as response:
            heard = events(response)  # which closes the response with its own end
            next(heard)
            refused = client.get(f"{url}/live/events")
            assert refused.status_code == 503
            assert "1 listeners watch the engine already" in refused.json()["error"]["message"]
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            with client.stream("GET", f"{url}/live/events") as response:
                if response.status_code == 200:
                    return
            time.sleep(0.05)
        pytest.fail("the listener that left is still counted")


def test_stream_ends_when_the_server_drains(service):
    async def main():
        feed = live.Feed(service)
        await feed.start()
        heard = []
        async for event in feed.events():
            heard.append(event)
            service.load.is_draining = len(heard) == 2
        return len(heard)

    assert run(main()) == 2


def test_server_that_is_told_to_end_does_not_wait_for_who_watches(folder):
    with (
        Served(f"model.path={folder}", *WORDS, "server.drain_timeout=50") as server,
        httpx.stream("GET", f"{server.url}/live/events", timeout=TIMEOUT_S) as response,
    ):
        heard = events(response)
        next(heard)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 25  # half of what it would give to requests
        list(heard)  # which ends, and in order: a broken connection would raise
