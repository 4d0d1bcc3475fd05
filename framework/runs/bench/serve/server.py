"""A server of ours in a process of its own: started with the configuration at hand, waited for, and ended.

Run as a module it is that process: the configuration comes through stdin, which stays open as long as the server is
wanted, so that it ends even when nobody can tell it to.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, FrameworkError

if TYPE_CHECKING:
    from framework.config import Config
    from framework.server.options import ServerOptions

TICK_S = 0.1
REFUSED = 2  # exit code of the process for a user's error
LENGTH = struct.Struct("!Q")


class OwnServer:
    """`url` and `pid` of a server that is ready. Raises ConfigError for a configuration that it refuses.

    tick  called while it gets ready; what it raises ends the server
    """

    def __init__(self, config: Config, options: ServerOptions, timeout_s: float, tick: Callable[[], Any]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`; a pipe that nobody reads would fill up
        program = [sys.executable, "-m", "framework.runs.bench.serve.server"]
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

    def close(self) -> None:
        """Ends the process: in order where it can, and within seconds."""
        try:
            if self._child.stdin is not None:
                self._child.stdin.close()
            self._child.send_signal(signal.SIGTERM)
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
            if self._child.poll() is not None:
                raise self._failed()
            if time.monotonic() > end:
                raise ConfigError(
                    f"bench.start_timeout_s={timeout_s:g}: our server was not ready by then. Raise it, or start the "
                    "server by itself and name it with bench.url"
                )
            tick()
            time.sleep(TICK_S)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
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


def _end_with_stdin() -> None:
    """Ends this process in order once whoever started it is gone."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _process() -> None:
    from framework.runs import RunArgs
    from framework.runs.serve import run

    (length,) = LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))
    config, options = pickle.loads(sys.stdin.buffer.read(length))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    run(config, RunArgs(server=options))


if __name__ == "__main__":
    try:
        _process()
    except FrameworkError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
