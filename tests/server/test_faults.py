"""Clients that break off, stop halfway or read nothing harm nobody else, and leave nothing behind."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import sys
import time

import pytest

from .counting import (
    MAX_LEN,
    assert_all_returned,
    assert_unharmed,
    body,
    connect,
    counted,
    head,
    neighbours,
    request_bytes,
    served_counting,
    stream,
    text_of,
)

pytest.importorskip("fastapi", reason="the server comes with the extra `serve`")
LONG = MAX_LEN - 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with served_counting(tmp_path_factory.mktemp("counting") / "model") as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    yield
    assert_unharmed(served)


CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("POST", "/v1/completions", sys.argv[2], {"content-type": "application/json"})
answer = connection.getresponse()
while answer.readline():
    print("read", flush=True)
"""


def test_client_that_is_killed_amid_its_stream_frees_what_it_had(served):
    asked = json.dumps(body(served, 5, LONG, n=4))
    with neighbours(served):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, served.url.removeprefix("http://"), asked], stdout=subprocess.PIPE
        )
        assert client.stdout.readline() == b"read\n"
        client.kill()
        client.wait()
        client.stdout.close()


def test_half_a_request_holds_up_nobody(served):
    whole = request_bytes(served, body(served, 1, 4))
    halves = [connect(served) for _ in range(60)]
    for place, bare in enumerate(halves):
        bare.sendall(whole[: 10 + place * (len(whole) - 12) // 60])  # within the head, and within the body
    with neighbours(served):
        pass
    for bare in halves:
        bare.close()
    assert stream(served, 2, 4) == counted(2, 4)


def leave(bare: socket.socket, is_abrupt: bool) -> None:
    """Ends a connection: politely, or with a reset."""
    if is_abrupt:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bare.close()


def test_a_hundred_disconnects_a_second_leave_nothing_behind(served):
    whole = request_bytes(served, body(served, 7, LONG))
    files = served.num_files
    start = time.monotonic()
    with neighbours(served):
        for place in range(200):
            bare = connect(served)
            bare.sendall(whole)
            if place % 4 == 0:
                bare.recv(100)
            leave(bare, is_abrupt=place % 2 == 0)
            time.sleep(max(0.0, start + place / 100 - time.monotonic()))
    assert_all_returned(served)
    assert served.num_files <= files + 5


def test_whoever_reads_nothing_delays_nobody_and_loses_nothing(served):
    asked = body(served, 9, 800, n=4, logprobs=40)  # some megabytes of events: more than the system keeps for a reader
    with connect(served) as fast:
        fast.sendall(request_bytes(served, asked))
        size = len(b"".join(read_all(fast)))
    before = served.resident_mb
    with connect(served, receive_buffer=4096) as slow:
        slow.sendall(request_bytes(served, asked))
        with neighbours(served):
            pass
        idle = served.wait_until(lambda found: not found["framework:num_requests_running"], timeout_s=60)
        assert idle["framework:num_requests_running"] == 0, "the engine waits for a reader"
        assert served.resident_mb < before + 40
        lines = read_all(slow)
    assert len(b"".join(lines)) < size, (
        "events of a reader who is behind go out as one: nothing is shown if there are as many"
    )
    assert lines[-1] == b"data: [DONE]"
    found = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    for index in range(4):
        assert text_of(iter(found), index) == counted(9, 800)


def read_all(bare: socket.socket) -> list[bytes]:
    """Lines of a stream's events, from its chunks."""
    answer = http.client.HTTPResponse(bare, method="POST")
    answer.begin()
    return [line for line in answer.read().splitlines() if line]


def test_whole_answer_that_nobody_waits_for_is_not_computed(served):
    bare = connect(served)
    before = served.total("framework:generation_tokens_total")
    bare.sendall(request_bytes(served, body(served, 3, LONG, n=2, stream=False)))
    served.wait_until(lambda found: found["framework:num_requests_running"] > 0)
    bare.close()
    assert_all_returned(served)
    assert served.total("framework:generation_tokens_total") - before < LONG, "half of what was asked for"


def test_garbage_that_is_no_http_is_refused(served):
    bare = connect(served)
    bare.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is no request\r\n\r\n")
    assert bare.recv(1000).startswith(b"HTTP/1.1 400")
    bare.close()


def test_headers_without_an_end_are_refused(served):
    bare = connect(served)
    answer = b""
    with neighbours(served, 1):
        try:
            bare.sendall(head(served)[:-2])
            for _ in range(64):
                bare.sendall(b"x-more: " + b"a" * 8000 + b"\r\n")
            answer = bare.recv(1000)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was closed while we wrote
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    bare.close()
