"""What the server lets in: sizes, counts, how many at a time and for how long; keys, and pages of other origins."""

import socket
import threading
import time

import httpx
import pytest

from framework.errors import ConfigError, FrameworkError
from framework.server.keys import ApiKeys
from framework.server.options import ServerOptions
from framework.server.service import Load
from framework.server.serving import bound_socket, make_server

from .here import events_of, serving

LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 8000, "prompt": "w5"}


@pytest.fixture(scope="module")
def small(chain):
    """Takes little of everything: two completions run and one waits."""
    options = {"max_body_bytes": 2000, "max_n": 3, "max_logprobs": 2, "max_waiting": 1}
    with serving(chain, "scheduler.max_num_seqs=2", **options) as running:
        yield running


def test_body_above_the_limit_is_413(small):
    response = small.complete(prompt="w5 " * 1000)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert small.complete(prompt="w5", max_tokens=1).status_code == 200


def test_body_in_chunks_is_counted_as_it_comes(small):
    chunks = (b"w5 " * 100 for _ in range(100))
    response = small.client.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413 and "2000 bytes" in response.json()["error"]["message"]


def test_body_is_refused_at_its_headers(small):
    """Nothing of it is waited for: a client that sends only its length has an answer."""
    with socket.create_connection(small.url.removeprefix("http://").rsplit(":", 1), timeout=5) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_body_that_comes_to_a_halt_is_408(small, monkeypatch):
    monkeypatch.setattr("framework.server.limits.MAX_PAUSE_S", 0.2)
    with socket.create_connection(small.url.removeprefix("http://").rsplit(":", 1), timeout=5) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b'content-length: 100\r\n\r\n{"prompt"')
        answer = b"".join(iter(lambda: sock.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer


def test_answer_may_take_longer_than_a_pause_of_a_body(small, monkeypatch):
    monkeypatch.setattr("framework.server.limits.MAX_PAUSE_S", 0.02)
    response = small.complete(prompt="w5", temperature=0, ignore_eos=True, max_tokens=300)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize("length", [b"-1", b"1" * 5000, b"x"])
def test_length_that_is_no_number_is_refused(small, length):
    with socket.create_connection(small.url.removeprefix("http://").rsplit(":", 1), timeout=5) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n")
        assert sock.recv(100)[9:12] in (b"400", b"413")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"n": 4}, "n", "limit of 3"),
        ({"prompt": ["w5", "w6"], "n": 2}, "prompt", "4 completions, above this server's limit of 3"),
        ({"logprobs": 3}, "logprobs", "limit of 2 tokens"),
        ({"logprobs": -1}, "logprobs", "the whole vocabulary"),
        ({"prompt_logprobs": 3}, "prompt_logprobs", "limit of 2"),
        ({"logprobs": 1, "logprob_token_ids": [1, 2, 4]}, "logprob_token_ids", "limit of 2"),
    ],
)
def test_more_than_a_request_may_ask_for_is_refused(small, body, param, says):
    response = small.complete(**{"prompt": "w5", **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize("words", [["x"] * 1025, ["x" * 40_000, "y" * 40_000]], ids=["many", "long"])
def test_words_that_every_token_is_compared_with_are_limited(here, field, words):
    response = here.complete(prompt="w5", **{field: words})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert "1024 strings with 65536 characters" in response.json()["error"]["message"]


@pytest.mark.parametrize("top", [-1, 3])
def test_chat_names_its_own_field_of_logprobs(small, top):
    response = small.chat(messages=[{"role": "user", "content": "w5"}], logprobs=True, top_logprobs=top)
    assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"
    assert f"top_logprobs={top} is not in 0..2" in response.json()["error"]["message"]


def test_beyond_those_that_may_wait_429_says_when_to_come_back(small):
    with small.asking({**LONG, "n": 3, "stream": True}):
        small.wait_until(lambda stats: stats["num_running"] == 2)
        response = small.complete(prompt="w5")
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert "server.max_waiting" in response.json()["error"]["message"]
        assert small.complete(prompt="").status_code == 429, "its prompt was looked at"
        assert small.client.get("/health").status_code == 200
    small.wait_until_idle()
    assert small.complete(prompt="w5", max_tokens=1).status_code == 200


# --------------------------------------------------------------------------------------------------------- time


@pytest.fixture(scope="module")
def hurried(chain):
    with serving(chain, request_timeout=0.4) as running:
        yield running


def test_request_that_takes_too_long_is_504_and_aborted(hurried):
    start = time.monotonic()
    response = hurried.complete(**LONG)
    assert response.status_code == 504 and response.json()["error"]["type"] == "timeout_error"
    assert time.monotonic() - start < 3
    hurried.wait_until_idle()


def test_stream_that_takes_too_long_ends_with_an_error(hurried):
    events = events_of(hurried.complete(stream=True, **LONG).text)
    assert events[0]["choices"][0]["text"] and events[-1]["error"]["code"] == "timeout"
    assert "server.request_timeout" in events[-1]["error"]["message"]
    hurried.wait_until_idle()


def test_reader_who_does_not_read_is_given_up_and_holds_up_nobody(chain):
    """What is written for it stays bounded, others get theirs meanwhile, and its request ends with its time."""
    body = {**LONG, "stream": True, "logprobs": 20}
    with serving(chain, request_timeout=2.5) as running, running.asking(body, receive_buffer=4096):
        running.wait_until(lambda stats: stats["num_running"] == 1)
        others = [running.complete(prompt="w5", temperature=0, max_tokens=3).json() for _ in range(5)]
        assert [one["choices"][0]["text"] for one in others] == ["w6 w7 w8"] * 5
        running.wait_until_idle()


# ---------------------------------------------------------------------------------------------------- keys, CORS


@pytest.fixture(scope="module")
def locked(chain, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("# ours\nsecond-key\n\n")
    options = {"api_keys": ["first-key"], "api_keys_file": str(file), "cors_origins": ["http://page.example"]}
    with serving(chain, **options) as running:
        yield running


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "first-key", "Basic first-key", "Bearer first-key2"]
)
def test_without_a_key_the_answer_is_401(locked, header):
    headers = {} if header is None else {"authorization": header}
    response = locked.client.get("/v1/models", headers=headers)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer second-key"])
def test_each_key_opens(locked, header):
    assert locked.client.get("/v1/models", headers={"authorization": header}).status_code == 200


def test_health_needs_no_key(locked):
    assert locked.client.get("/health").status_code == 200


def test_keys_are_kept_as_digests_alone():
    assert "secret" not in repr(vars(ApiKeys(lambda *_: None, ["secret"])))


def test_pages_of_named_origins_may_ask_and_others_may_not(locked, here):
    asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
    allowed = locked.client.options("/v1/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    told = locked.client.get("/health", headers=asked).headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after"} <= set(told.replace(" ", "").split(","))
    other = locked.client.options("/v1/completions", headers={**asked, "origin": "http://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in here.client.get("/health", headers=asked).headers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 70000}, "server.port=70000 is too large"),
        ({"port": -1}, "server.port=-1 is too small"),
        ({"host": ""}, "server.host= is empty"),
        ({"max_n": 0}, "server.max_n=0 is too small"),
        ({"request_timeout": 0}, "server.request_timeout=0 must be above 0"),
        ({"drain_timeout": float("inf")}, "server.drain_timeout=inf must be finite"),
        ({"api_keys": [" "]}, "server.api_keys holds an empty key"),
    ],
)
def test_option_that_cannot_be_used_is_named(options, says):
    with pytest.raises(ConfigError) as error:
        ServerOptions(**options)
    assert says in str(error.value)


def test_file_of_keys_that_has_none_is_refused(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("# nothing\n")
    for name, says in ((str(empty), "holds no key"), (str(tmp_path / "absent"), "cannot be read")):
        with pytest.raises(ConfigError, match=says):
            ServerOptions(api_keys_file=name).keys()


def test_server_whose_parts_cannot_begin_ends_with_an_error():
    async def broken(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": ""})

    options = ServerOptions(port=0)
    with bound_socket(options) as sock, pytest.raises(FrameworkError, match="the server did not start"):
        make_server(broken, Load(), options, pytest.fail).run(sockets=[sock])


# --------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has times of its own")
def test_who_has_gone_without_a_word_is_noticed_by_the_system():
    with bound_socket(ServerOptions(port=0)) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as taken:
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 600_000


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_ends_its_request_and_frees_its_blocks(here, stream):
    here.wait_until_idle()
    with here.asking({**LONG, "n": 2, "stream": stream}):
        here.wait_until(lambda stats: stats["num_running"] == 2)
        num_open = here.service.load.num_open
    here.wait_until_idle()
    assert num_open == 2 and here.service.load.num_open == 0


def test_many_who_leave_disturb_nobody(here):
    here.wait_until_idle()

    def leave():
        with httpx.stream("POST", f"{here.url}/v1/completions", json={**LONG, "stream": True}, timeout=10) as stream:
            next(stream.iter_bytes())

    threads = [threading.Thread(target=leave) for _ in range(12)]
    for thread in threads:
        thread.start()
    kept = [here.complete(prompt="w5", temperature=0, max_tokens=40, ignore_eos=True).json() for _ in range(4)]
    for thread in threads:
        thread.join()
    here.wait_until_idle()
    assert len({one["choices"][0]["text"] for one in kept}) == 1 and kept[0]["usage"]["completion_tokens"] == 40
