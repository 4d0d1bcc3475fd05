"""From a service to a process that listens: the socket, signals, and how the server ends. Called by `run=serve`.

The first SIGTERM or Ctrl-C drains: requests that run go on, new ones are answered 503, and what is left after
`server.drain_timeout` is aborted. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from framework.ending import SIGNALS, end_at_once
from framework.errors import ConfigError, FrameworkError, as_typed
from framework.server.corked import CorkedProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from framework.server.options import ServerOptions
    from framework.server.service import Load

_log = logging.getLogger("framework")
BACKLOG = 2048
MAX_FILES = 65536
KEEP_ALIVE_S = 75
LAST_ANSWERS_S = 5
"""Seconds for what was aborted to tell its clients."""
POLL_S = 0.02
NICENESS = -15
"""Of the event loop's thread, if it may. On two busy cores a stream's first token is read 5.5 ms later than the engine
knows of it, the way there included, and not 6.5 (medians of 384)."""
TAKEN_FOR_GONE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 600_000}
"""Whom the system takes for gone: who answers no probe for two minutes, as a machine without power, and who takes
nothing for ten (milliseconds) of what there is for it. Its request would count as open for ever."""


def bound_socket(options: ServerOptions) -> socket.socket:
    """A socket with the server's address, which does not listen yet. ConfigError where it cannot be had."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_who_has_gone(sock)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"server.host={as_typed(options.host)}, server.port={options.port}: cannot listen there "
            f"({error.strerror or error}). Choose another, or server.port=0 for a free port"
        ) from None
    return sock


def _notice_who_has_gone(sock: socket.socket) -> None:
    """Connections have the options of the socket that took them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TAKEN_FOR_GONE.items():
        if hasattr(socket, name):  # as on Linux; elsewhere the system has times of its own
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_connections() -> None:
    """Raises the number of files that this process may have open: a connection is one, and shells give few."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_first() -> None:
    """Lets this thread, the event loop's, run before those that compute, where the system allows it: on Linux, with the
    capability SYS_NICE. They fill all cores for the length of a step, and requests are read and told of amid that. The
    threads that this one begins are like others again."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def address_of(sock: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_server(app: ASGIApp, load: Load, options: ServerOptions, ready: Callable[[], None]) -> Server:
    """A server whose `run(sockets=[...])` serves until a signal ends it. ready: called when requests are taken."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        server_header=False,
        ws="none",
        http=CorkedProtocol,  # of h11: httptools, which uvicorn takes where it is there, keeps headers of any length
        lifespan="on",
    )
    return Server(config, load, options, ready)


class Server(uvicorn.Server):
    """uvicorn's, which drains before it shuts down."""

    def __init__(self, config: uvicorn.Config, load: Load, options: ServerOptions, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._load, self._options, self._ready = load, options, ready
        self._drained: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with suppress(SystemExit):  # which later versions of uvicorn raise where earlier ones return
            await super().startup(sockets)
        if not self.started:
            raise FrameworkError("the server did not start; what kept it from that stands above")
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self.drain, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def drain(self, number: int) -> None:
        """Begins to end; the second time it ends the process at once."""
        if self._drained is not None:
            end_at_once(number, None)
        self._load.is_draining = True
        _log.info("draining: %d completions are open", self._load.num_open)
        self._drained = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        until = asyncio.get_running_loop().time() + self._options.drain_timeout
        while self._load.num_open and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
        if self._load.num_open:
            _log.warning("%d completions are aborted after server.drain_timeout", self._load.num_open)
            self._load.cancel()
        self.should_exit = True
