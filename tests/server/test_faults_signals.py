"""SIGTERM under load: who streams gets all of it, who comes later is refused, and the server ends in time with 0."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from framework.testing.served import Served

from .counting import MAX_LEN, WORDS, assert_no_traceback, body, counted, events, save_counting, stream

pytest.importorskip("fastapi", reason="the server comes with the extra `serve`")
LONG = MAX_LEN - 8
SOME = 800
"""Tokens that take a second, and less than a limit on the slowest machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_counting(tmp_path_factory.mktemp("counting") / "model")


def wait_for_running(served: Served, count: int) -> None:
    found = served.wait_until(lambda found: found["framework:num_requests_running"] >= count)
    assert found["framework:num_requests_running"] >= count


def is_refused(served: Served) -> bool:
    """Whether a request that comes now is turned away, by an answer or by a port that nobody listens at."""
    try:
        answer = httpx.post(f"{served.url}/v1/completions", json=body(served, 1, 1, stream=False), timeout=10)
    except httpx.TransportError:
        return True
    return answer.status_code == 503


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_running_streams_end_and_new_requests_are_refused(folder, how):
    words = ["server.drain_timeout=300"]
    with Served(f"model.path={folder}", *WORDS, *words) as served, ThreadPoolExecutor(6) as pool:
        running = [pool.submit(stream, served, start, SOME) for start in range(6)]
        wait_for_running(served, 6)
        served.process.send_signal(how)
        time.sleep(0.1)
        assert is_refused(served)
        assert not any(one.done() for one in running), "they had ended before: nothing is shown"
        for start, one in enumerate(running):
            assert one.result() == counted(start, SOME)
        assert served.wait() == 0, served.printed
        assert_no_traceback(served)


def test_drain_limit_ends_what_still_runs(folder):
    words = ["server.drain_timeout=0.3", "scheduler.max_num_seqs=2"]
    with Served(f"model.path={folder}", *WORDS, *words) as served, ThreadPoolExecutor(8) as pool:
        are_whole = [pool.submit(is_served_whole, served, start) for start in range(8)]
        wait_for_running(served, 2)
        start_s = time.monotonic()
        assert served.stop() == 0, served.printed
        assert time.monotonic() - start_s < 20
        assert not all(one.result() for one in are_whole), "all had ended within the limit: nothing is shown"
        assert_no_traceback(served)


def is_served_whole(served: Served, start: int) -> bool:
    """Whether a stream was served whole; what came of it is right in any case."""
    text = ""
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body(served, start, LONG), timeout=60) as answer:
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.read()
                return False
            for event in events(answer):
                if "error" in event:
                    break
                text += "".join(choice["text"] for choice in event["choices"])
    except httpx.TransportError:
        pass
    assert counted(start, LONG).startswith(text)
    return len(text) == len(counted(start, LONG))


def test_idle_server_ends_at_once(folder):
    with Served(f"model.path={folder}", *WORDS) as served, httpx.Client() as idle:  # which keeps its connection open
        assert idle.get(f"{served.url}/health").status_code == 200
        start_s = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - start_s < 20, "it waits for a connection that says nothing"


def test_second_signal_does_not_wait(folder):
    with Served(f"model.path={folder}", *WORDS, "server.drain_timeout=300") as served:
        reader = threading.Thread(target=is_served_whole, args=(served, 3))
        reader.start()
        wait_for_running(served, 1)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        served.stop(signal.SIGTERM, timeout_s=20)
        reader.join()
