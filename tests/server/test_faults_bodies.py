"""Bodies that are too large, broken or absurd: a 4xx in OpenAI's shape, at once, and the server goes on."""

from __future__ import annotations

import json

import httpx
import pytest

from framework.testing.served import Served

from .counting import (
    assert_unharmed,
    body,
    connect,
    counted,
    head,
    neighbours,
    served_counting,
    stream,
)

pytest.importorskip("fastapi", reason="the server comes with the extra `serve`")
MANY = 100 * 2**20
PIECE = b" " * 2**16


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with served_counting(tmp_path_factory.mktemp("counting") / "model") as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    yield
    assert_unharmed(served)


def send_until_answered(served: Served, start: bytes, piece: bytes) -> tuple[bytes, int]:
    """(first bytes of the answer, bytes that went out before the server took no more): 100 MB at most."""
    sent = 0
    with connect(served) as bare:
        bare.sendall(start)
        bare.settimeout(5)
        try:
            while sent < MANY:
                bare.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
        try:
            return bare.recv(2000), sent
        except ConnectionResetError:  # the answer came before the rest was read, and was lost with it
            return b"", sent


FORMS = {
    "with its length": (f"content-length: {MANY}", PIECE),
    "in chunks": ("transfer-encoding: chunked", b"10000\r\n" + PIECE + b"\r\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_body_of_100_mb_is_refused_and_not_kept(served, form):
    line, piece = FORMS[form]
    before = served.resident_mb
    with neighbours(served, 2):
        answer, sent = send_until_answered(served, head(served, line), piece)
    assert served.resident_mb < before + 40
    assert answer.startswith(b"HTTP/1.1 413") or (answer == b"" and sent < MANY)


def test_413_names_the_limit(served):
    with connect(served) as bare:
        bare.sendall(head(served, f"content-length: {MANY}"))
        answer = bare.makefile("rb").read()  # up to the end of the connection: it comes in pieces
    assert answer.startswith(b"HTTP/1.1 413") and b"server.max_body_bytes" in answer


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = {
    "nothing": b"",
    "spaces": b"   ",
    "invalid UTF-8": b'{"model": "m", "prompt": "\xff\xfe\xc3("}',
    "truncated JSON": b'{"model": "m", "prompt": "a',
    "two documents": b'{"prompt": "a"}{"prompt": "b"}',
    "no object": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "deep JSON": DEEP.encode(),
    "deep prompt": f'{{"prompt": {DEEP}}}'.encode(),
    "deep objects": ('{"a":' * 50_000 + "1" + "}" * 50_000).encode(),
    "NaN": b'{"prompt": [1], "temperature": NaN}',
    "infinity": b'{"prompt": [1], "temperature": 1e999}',
    "an integer of many digits": b'{"prompt": [1], "seed": ' + b"9" * 6000 + b"}",
    "an id beyond 64 bits": b'{"prompt": [99999999999999999999999]}',
    "a negative id": b'{"prompt": [-1]}',
    "a bool for an id": b'{"prompt": [true]}',
    "a float for an id": b'{"prompt": [1.5]}',
    "an empty prompt": b'{"prompt": []}',
    "prompts of many kinds": b'{"prompt": [1, "a", [2]]}',
    "a surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate for a field": b'{"prompt": [1], "\\ud800": 1}',
    "a surrogate for a value": b'{"prompt": [1], "max_tokens": "\\ud800"}',
    "a bias of everything": json.dumps({"prompt": [1], "logit_bias": {str(i): 1e9 for i in range(5000)}}).encode(),
    "an allow-list of nothing": b'{"prompt": [1], "allowed_token_ids": []}',
    "a regex that is none": b'{"prompt": [1], "structured_outputs": {"regex": "(((("}}',
    "a deep schema": json.dumps(
        {"prompt": [1], "structured_outputs": {"json": json.loads('{"items":' * 400 + "{}" + "}" * 400)}}
    ).encode(),
    "a schema of itself": b'{"prompt": [1], "structured_outputs": {"json": {"$ref": "#"}}}',
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_body_is_a_bad_request(served, case):
    kind = {"content-type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/completions", content=BROKEN[case], headers=kind, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error", error


def test_model_that_is_a_surrogate_is_not_found(served):
    answer = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": [1], "model": "\\ud800"}')
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("case", ["nothing", "invalid UTF-8", "truncated JSON", "no object", "deep JSON"])
def test_every_route_refuses_broken_json(served, path, case):
    kind = {"content-type": "application/json"}
    answer = httpx.post(f"{served.url}{path}", content=BROKEN[case], headers=kind, timeout=30)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


def test_text_that_is_not_said_to_be_json_is_refused_or_read(served):
    asked = json.dumps(body(served, 1, 4, stream=False))
    answer = httpx.post(f"{served.url}/v1/completions", content=asked, headers={"content-type": "text/plain"})
    assert answer.status_code in (200, 400, 415)


def test_methods_that_are_not_served_are_named(served):
    answer = httpx.put(f"{served.url}/v1/completions", json={})
    assert answer.status_code == 405 and answer.json()["error"]["message"]
    answer = httpx.get(f"{served.url}/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_after_all_of_it_tokens_are_right(served):
    assert stream(served, 4, 50) == counted(4, 50)


ONES, NAMES = [1] * 200_000, {f"a{i}": 1 for i in range(100_000)}
MANY_WRONG = [
    ("/v1/completions", {"prompt": [1], "stop": ONES}),
    ("/v1/completions", {"prompt": ["a"] * 200_000 + [1]}),
    ("/v1/completions", {"prompt": [1], "stages": NAMES}),
    ("/v1/completions", {"prompt": [1], "logit_bias": NAMES}),
    ("/v1/chat/completions", {"messages": ONES}),
    ("/v1/responses", {"input": ONES}),
    ("/detokenize", {"tokens": ["a"] * 200_000}),
]


def test_of_many_wrong_items_the_first_is_told_and_none_is_kept(served):
    before = served.resident_mb
    for path, wrong in MANY_WRONG:
        answer = httpx.post(f"{served.url}{path}", json=wrong, timeout=60)
        assert answer.status_code == 400 and len(answer.content) < 1000, answer.text[:2000]
        assert served.resident_mb < before + 60
