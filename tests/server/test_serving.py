"""The process around the application: its address, and how many connections it may hold."""

import contextlib
import os
import resource
import socket
import threading

import httpx
import pytest

from framework.errors import ConfigError
from framework.server.options import ServerOptions
from framework.server.serving import NICENESS, address_of, allow_connections, bound_socket, run_first

from .here import serving


def test_port_0_is_a_free_port_that_is_told():
    with bound_socket(ServerOptions(port=0)) as first, bound_socket(ServerOptions(port=0)) as second:
        assert address_of(first) != address_of(second)
        assert address_of(first).startswith("http://127.0.0.1:") and not address_of(first).endswith(":0")


@pytest.mark.skipif(not socket.has_ipv6, reason="this system knows no IPv6")
def test_address_of_ipv6_stands_in_brackets():
    try:
        sock = bound_socket(ServerOptions(host="::1", port=0))
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with sock:
        assert address_of(sock).startswith("http://[::1]:")


def test_nobody_is_kept_waiting_by_a_port_that_does_not_serve_yet():
    """While the model loads a client is refused at once, and may try again."""
    with bound_socket(ServerOptions(port=0)) as sock, pytest.raises(httpx.ConnectError):
        httpx.get(f"{address_of(sock)}/health", timeout=5)


def test_more_connections_than_the_shell_allows_are_taken():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65536, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def in_a_thread(function):
    """What `function` answers in a thread that ends: what it sets for itself ends with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def may_run_first():
    before = niceness()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before - 1)
    return niceness() < before


@pytest.mark.skipif(not in_a_thread(may_run_first), reason="this process may not raise a priority")
def test_event_loop_runs_before_what_computes_and_what_it_begins_does_not():
    def both():
        run_first()
        return niceness(), in_a_thread(niceness)

    assert in_a_thread(both) == (NICENESS, 0) and niceness() > NICENESS


def test_server_that_may_not_run_first_runs_like_others(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert in_a_thread(lambda: (run_first(), niceness())[1]) == niceness()


def test_draining_server_answers_503_until_what_runs_has_ended(chain):
    long = {"prompt": "w5", "temperature": 0, "ignore_eos": True, "max_tokens": 600, "stream": True}
    with serving(chain) as running, running.asking(long) as sock:
        running.wait_until(lambda stats: stats["num_running"] == 1)
        running.service.load.is_draining = True
        refused, health = running.complete(prompt="w5"), running.client.get("/health")
        running.service.load.is_draining = False
        received = b""
        while b"[DONE]" not in received:
            received += sock.recv(65536)
    assert (refused.status_code, health.status_code) == (503, 503) and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    assert b'"finish_reason":"length"' in received
