"""A server whose model counts: after token t comes t + 1, and each token's text is its own.

What a stream lost, repeated or mixed up shows in its text. Used by the tests of faults, beside the fault and after it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from tokenizers import Tokenizer, decoders, models

from framework.testing.crafted import save_crafted
from framework.testing.served import Served

VOCAB, MAX_LEN, NUM_BLOCKS = 61, 4096, 3000
WORDS = [
    "engine.dtype=float32", f"kv_cache.num_blocks={NUM_BLOCKS}", "kv_cache.block_size=16", "scheduler.max_num_seqs=16",
]  # fmt: skip


def save_counting(folder: Path) -> Path:
    save_crafted(folder, torch.eye(VOCAB).roll(1, 1) * 9, max_len=MAX_LEN)
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}<1>{{ message.content }}{% endfor %}")
    return folder


def counted(start: int, num_tokens: int) -> str:
    """What follows token `start`."""
    return "".join(f"<{(start + 1 + i) % VOCAB}>" for i in range(num_tokens))


def body(served: Served, start: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": served.model,
        "prompt": [start],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        **more,
    }


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Those of a stream; AssertionError if it does not end with [DONE]."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


def text_of(events: Iterator[dict[str, Any]], index: int = 0) -> str:
    """Text of one choice. AssertionError for an event that is an error."""
    text = ""
    for event in events:
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"] if choice["index"] == index)
    return text


def stream(served: Served, start: int, num_tokens: int) -> str:
    """Text of one stream, read to its end."""
    asked = body(served, start, num_tokens)
    with httpx.stream("POST", f"{served.url}/v1/completions", json=asked, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        return text_of(events(answer))


@contextmanager
def neighbours(served: Served, count: int = 3, num_tokens: int = 500) -> Iterator[None]:
    """Streams beside what the block does: each gives its own tokens, all of them, once."""
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(stream, served, start, num_tokens) for start in range(count)]
        yield
        for start, one in enumerate(running):
            assert one.result() == counted(start, num_tokens), f"tokens after {start}"


def assert_all_returned(served: Served) -> None:
    """Nothing runs, waits or holds a block, a moment after the last fault."""
    names = [f"framework:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    held = served.wait_until(lambda found: not any(found[name] for name in names))
    assert {name: held[name] for name in names} == dict.fromkeys(names, 0.0)


def assert_no_traceback(served: Served) -> None:
    """Nothing went wrong inside, whatever was answered."""
    _, found, text = served.printed.partition("Traceback")
    assert not found, text[-3000:]


def connect(served: Served, receive_buffer: int | None = None) -> socket.socket:
    """A bare connection. receive_buffer: bytes that may arrive without being read"""
    place = urlsplit(served.url)
    bare = socket.socket()
    if receive_buffer is not None:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    bare.settimeout(20)
    bare.connect((place.hostname, place.port))
    return bare


def head(served: Served, *lines: str, path: str = "/v1/completions") -> bytes:
    """Request line and headers of a POST."""
    fixed = [f"POST {path} HTTP/1.1", f"host: {urlsplit(served.url).netloc}", "content-type: application/json"]
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def request_bytes(served: Served, asked: dict[str, Any]) -> bytes:
    """A whole request as it goes over the wire."""
    content = json.dumps(asked).encode()
    return head(served, f"content-length: {len(content)}") + content


@contextmanager
def served_counting(folder: Path) -> Iterator[Served]:
    """A server that counts, for which what is made for the first request is there."""
    with Served(f"model.path={save_counting(folder)}", *WORDS) as served:
        stream(served, 0, 4)
        yield served


def assert_unharmed(served: Served) -> None:
    """It runs, has told of no fault of its own, and has all rows and blocks back."""
    assert served.process.poll() is None, served.printed
    assert_no_traceback(served)
    assert_all_returned(served)
