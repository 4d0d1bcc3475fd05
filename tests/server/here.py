"""A server in this process, on a free port: what most tests of the routes ask."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from framework import AsyncLLM
from framework.config import compose
from framework.server.app import make_app
from framework.server.options import ServerOptions
from framework.server.service import Service
from framework.server.serving import address_of, bound_socket, make_server

SMALL = ("engine.dtype=float32", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=600")


@dataclass
class Here:
    """A running server. idle: the counters of its engine before anything ran."""

    url: str
    service: Service
    client: httpx.Client
    server: object
    idle: dict = field(default_factory=dict)

    def stats(self):
        return self.service.llm._thread.submit(self.service.llm._engine.stats).result()

    def wait_until(self, claim, seconds=10.0):
        """Waits until the engine's counters bear out `claim`."""
        end = time.monotonic() + seconds
        while not claim(self.stats()):
            assert time.monotonic() < end, f"not within {seconds} s: {self.stats()}"
            time.sleep(0.01)

    def wait_until_idle(self):
        """Until no request is left, and every block is free again."""
        free = self.idle["num_free_blocks"]
        self.wait_until(lambda s: s["num_running"] == s["num_waiting"] == 0 and s["num_free_blocks"] == free)

    @contextmanager
    def asking(self, body, receive_buffer=None):
        """A client of `/v1/completions` that reads nothing of its answer, and leaves at the end."""
        sent = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        with socket.socket() as sock:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(10)
            sock.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
            sock.sendall(f"{head}{len(sent)}\r\n\r\n".encode() + sent)
            yield sock

    def complete(self, **body):
        return self.client.post("/v1/completions", json=body)

    def chat(self, **body):
        return self.client.post("/v1/chat/completions", json=body)


@contextmanager
def serving(folder, *words, **options):
    """words: of the configuration. options: fields of ServerOptions."""
    made = ServerOptions(**{"port": 0, "model_name": "small", **options})
    ready = threading.Event()
    config = compose([f"model.path={folder}", *SMALL, *words])
    with AsyncLLM(config=config) as llm, bound_socket(made) as sock:
        service = Service(llm, config, made.model_name, 1700000000, made)
        server = make_server(make_app(service), service.load, made, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(20), "the server did not start"
            with httpx.Client(base_url=address_of(sock), timeout=30) as client:
                here = Here(address_of(sock), service, client, server)
                here.idle = here.stats()
                yield here
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not end"


def events_of(text):
    """Objects of a stream of server-sent events, and whether it ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", f"the stream ends with {lines[-1]}"
    return [json.loads(line) for line in lines[:-1]]
