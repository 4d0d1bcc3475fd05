"""A server of ours in a process of its own: started with the configuration at hand, waited for, and ended.

What that process does is `runs/bench/serve_process.py`'s.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError
from framework.runs.bench.serve_process import LENGTH, REFUSED

if TYPE_CHECKING:
    from framework.config import Config
    from framework.server.options import ServerOptions

TICK_S = 0.1
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this machine itself, whatever proxy the environment names."""


class OwnServer:
    """`url` and `pid` of a server that is ready. Raises ConfigError for a configuration that it refuses.

    tick  called while it gets ready; what it raises ends the server
    """

    def __init__(self, config: Config, options: ServerOptions, timeout_s: float, tick: Callable[[], Any]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`; a pipe that nobody reads would fill up
        program = [sys.executable, "-m", "framework.runs.bench.serve_process"]
        self._child = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, start_new_session=True
        )  # a Ctrl-C is ours alone: the answers that are under way come first
        self.pid = self._child.pid
        try:
            self._give(pickle.dumps((config, replace(options, host="127.0.0.1", port=port))))
            self._wait(timeout_s, tick)
        except BaseException:
            self._child.kill()
            self.close()
            raise

    def check(self) -> None:
        """Raises RuntimeError with what the server said, or ConfigError with its refusal, when it has ended."""
        if self._child.poll() is not None:
            raise self._failed()

    def close(self) -> None:
        """Ends the process: in order where it can, and within seconds."""
        try:
            if self._child.stdin is not None:
                self._child.stdin.close()  # it sends itself SIGTERM; a second one would break it off
            self._child.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()
        finally:
            self._said.close()

    def _give(self, text: bytes) -> None:
        assert self._child.stdin is not None, "the process was made with a pipe"
        try:
            self._child.stdin.write(LENGTH.pack(len(text)) + text)
            self._child.stdin.flush()
        except BrokenPipeError:  # it has ended: `_wait` says why
            pass

    def _wait(self, timeout_s: float, tick: Callable[[], Any]) -> None:
        end = time.monotonic() + timeout_s
        while not self._is_ready():
            self.check()
            if time.monotonic() > end:
                raise ConfigError(
                    f"bench.start_timeout_s={timeout_s:g}: our server was not ready by then. Raise it, or start the "
                    "server by itself and name it with bench.url"
                )
            tick()
            time.sleep(TICK_S)

    def _is_ready(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _failed(self) -> Exception:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        if self._child.returncode == REFUSED and said:
            return ConfigError(said.splitlines()[-1].removeprefix("error: "))
        return RuntimeError(f"the server of bench=serve ended with {self._child.returncode}:\n{said}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
