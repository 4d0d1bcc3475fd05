"""`bench=startup`: a fresh process a round, from its start to its first token, part by part.

Run as a module it is that process: the configuration comes through stdin, the moments go out as one JSON line.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, ClassVar

from framework.errors import ConfigError, FrameworkError
from framework.interfaces import BenchRound
from framework.runs.options import SET_BY_WORKLOADS

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.runs.options import StartupOptions


TICK_S = 0.1
REFUSED = 2  # exit code of the process for a user's error


class Startup:
    """`interfaces.Bench`: composing the configuration is not in it, since the process gets it whole."""

    unread: ClassVar[Mapping[str, str]] = SET_BY_WORKLOADS
    needs_engine: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("interpreter and imports", "checkpoint", "weights", "the rest", "first token")
    units: ClassVar[Mapping[str, str]] = {"start to first token": "s", **dict.fromkeys(parts, "s")}
    num_units: ClassVar[int] = 1

    def __init__(self, options: StartupOptions, config: Config) -> None:
        self._options, self._config = options, config
        limit = config.engine.max_model_len
        if limit is not None and options.input_len + 1 > limit:
            raise ConfigError(
                f"bench.input_len={options.input_len} and one token make {options.input_len + 1}, but "
                f"engine.max_model_len is {limit}. Shorten it, or raise engine.max_model_len"
            )

    def check(self, engine: Engine | None) -> None:
        """Nothing to check: whatever is wrong with the configuration ends the first process."""

    def round(self, engine: Engine | None, number: int, advance: Callable[[int], Any]) -> BenchRound:
        program = [sys.executable, "-m", "framework.runs.bench.startup", str(self._options.input_len)]
        start = time.time()
        code, out, err = _run([*program, str(start)], pickle.dumps(self._config), lambda: advance(0))
        if code:
            raise _failed(code, err.decode(errors="replace").strip())
        moments = json.loads(out.splitlines()[-1])
        advance(1)
        return BenchRound(_parts(moments), {})


def _run(program: Sequence[str], text: bytes, tick: Callable[[], Any]) -> tuple[int, bytes, bytes]:
    """(exit code, stdout, stderr) of a process; what `tick` raises, called again and again meanwhile, ends it."""
    with tempfile.TemporaryFile() as given:  # a pipe would be left half written by the first timeout
        given.write(text)
        given.seek(0)
        return _watched(subprocess.Popen(program, stdin=given, stdout=PIPE, stderr=PIPE), tick)


def _watched(child: subprocess.Popen[bytes], tick: Callable[[], Any]) -> tuple[int, bytes, bytes]:
    with child:
        try:
            while True:
                try:
                    out, err = child.communicate(timeout=TICK_S)
                    break
                except subprocess.TimeoutExpired:
                    tick()
            tick()  # a Ctrl-C reaches the process as well
        except BaseException:
            child.kill()
            raise
    return child.returncode, out, err


def _failed(code: int, said: str) -> Exception:
    """The user's error that the process ended with, or what it said before it crashed."""
    if code == REFUSED:
        return ConfigError(said.splitlines()[-1])
    return RuntimeError(f"the process of bench=startup ended with {code}:\n{said}")


def _parts(moments: Mapping[str, Any]) -> dict[str, float]:
    seconds = moments["seconds"]
    checkpoint, weights = seconds["open"] + seconds["tokenizer"], seconds["load"]
    return {
        "start to first token": moments["first_token"],
        "interpreter and imports": moments["imported"],
        "checkpoint": checkpoint,
        "weights": weights,
        "the rest": moments["built"] - moments["imported"] - checkpoint - weights,
        "first token": moments["first_token"] - moments["built"],
    }


def _process(input_len: int, start: float) -> None:
    import torch  # noqa: F401  what every engine imports: its time is told apart from the engine's own

    from framework.engine.build import build_engine

    config = pickle.load(sys.stdin.buffer)
    imported = time.time() - start
    engine = build_engine(config)
    built = time.time() - start
    params = engine.admission.defaults.replace(n=1, max_tokens=1, detokenize=False)
    engine.add_request("first", [1 % engine.admission.limits.vocab_size] * input_len, params)
    while engine.has_unfinished_requests():
        engine.step()
    moments = {"imported": imported, "built": built, "first_token": time.time() - start}
    print(json.dumps({**moments, "seconds": dict(engine.facts["seconds"])}))
    engine.close()


if __name__ == "__main__":
    try:
        _process(int(sys.argv[1]), float(sys.argv[2]))
    except FrameworkError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
