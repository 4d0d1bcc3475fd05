"""A server in a process of its own: started on a free port, asked what it holds, ended by a signal.

Knows the command line and the line that says that it is ready, and nothing of what is served. Used by the tests of the
server and by the benchmarks that load it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

READY = re.compile(r"serving (.+) at (http://\S+)")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


class Served:
    """`python -m framework serve` with more words, from when it is ready to `stop`; usable with `with`.

    url     without a path and without a slash at the end
    model   the name that it says it serves
    RuntimeError, with what it printed, when it ends or is not ready within `timeout_s`.
    """

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> None:
        command = [sys.executable, "-m", "framework", "serve", "server.port=0", *words]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_ready.wait(timeout_s) or not hasattr(self, "url"):
            self.stop(signal.SIGKILL)
            raise RuntimeError(f"{' '.join(command)} is not ready:\n{self.printed}")

    @property
    def printed(self) -> str:
        """All that it has written, logs and all."""
        return "".join(self.lines)

    @property
    def resident_mb(self) -> float:
        """Memory of the process that is in use, 10^6 bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def cpu_s(self) -> float:
        """Seconds of all cores that it has taken, by itself and by the system for it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def num_files(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics: their name, with their labels as they stand, to the value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {f"{name}{{{labels}}}" if labels else name: float(v) for name, labels, v in SAMPLE.findall(text)}

    def total(self, name: str) -> float:
        """Sum over the labels of one metric. KeyError if there is none."""
        found = [value for key, value in self.metrics().items() if key.partition("{")[0] == name]
        if not found:
            raise KeyError(name)
        return sum(found)

    def wait_until(self, holds: Callable[[dict[str, float]], bool], timeout_s: float = 10.0) -> dict[str, float]:
        """Metrics that a condition holds for; the last ones, for which it does not, after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not holds(found := self.metrics()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def stop(self, how: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Sends a signal and gives the exit code; one that has ended gives its own. May be called again."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code, once it ends by itself. subprocess.TimeoutExpired, and its end, where it does not."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop(signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if ready := READY.search(line):
                self.model, self.url = ready[1], ready[2].rstrip("/")
                self._is_ready.set()
        self.process.stdout.close()
        self._is_ready.set()  # it has ended
