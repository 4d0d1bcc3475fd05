"""The process of a server that `bench=serve` starts, run as a module. It imports nothing of the client.

The configuration comes through stdin, which stays open as long as the server is wanted: it ends in order when that
closes, so also when whoever started it is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading

from framework.errors import FrameworkError

LENGTH = struct.Struct("!Q")
"""Of the pickled (Config, ServerOptions) that follows it."""
REFUSED = 2
"""Exit code for a user's error, which is the last line of stderr then."""


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread may not hold when the interpreter ends
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def _serve() -> None:
    from framework.runs import RunArgs
    from framework.runs.serve import run

    (length,) = LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))
    config, options = pickle.loads(sys.stdin.buffer.read(length))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    run(config, RunArgs(server=options))


if __name__ == "__main__":
    try:
        _serve()
    except FrameworkError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
