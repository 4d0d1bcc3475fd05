"""The engine of a run, opened and closed around it; in a sweep, weights stay for the next job that needs the same.

The runs that step an engine call `open_engine`. What makes weights the same is `Loaded`'s to say; everything else of an
engine (KV blocks and what they hold, scheduler, sampler, requests) is made anew for each job.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, RequestError
from framework.runs import Incomplete

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.engine.loaded import Loaded

HARMLESS = (ConfigError, RequestError, Incomplete)
"""What is raised with the model untouched: a value or a request was refused."""


class KeptWeights:
    """What a job of a sweep leaves for the next job of its process. Not for several threads.

    facts      of the engine that was opened last, None while none was
    were_kept  whether it took over the weights of the one before it
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] | None = None
        self.were_kept = False
        self._keeps = True
        self._loaded: Loaded | None = None

    def take(self, config: Config) -> Loaded | None:
        """The weights if they serve `config`. Others are given up, before their successors need the memory."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not loaded.serves(config):
            loaded = None
        gc.collect()  # an engine is a web of references: its KV blocks would stay until the collector comes by itself
        return loaded

    def leave(self, loaded: Loaded) -> None:
        """For the next job."""
        self._loaded = loaded if self._keeps else None

    def give_up(self) -> None:
        """Frees them, for a job whose processes need the memory themselves."""
        self._loaded = None
        gc.collect()

    def begin(self, keep: bool) -> None:
        """Before a job, which may open no engine at all. keep: whether weights stay from here on."""
        self.facts, self.were_kept, self._keeps = None, False, keep
        if not keep:
            self._loaded = None


@contextmanager
def open_engine(config: Config, kept: KeptWeights | None) -> Iterator[Engine]:
    """An engine for `config`, closed at the end. Raises as `LLM` does.

    kept  weights are taken from there and left there, except after an error that may have touched them; None: a run of
          its own, which loads them and frees them
    """
    from framework.engine.build import build_engine

    loaded = None if kept is None else kept.take(config)
    engine = None
    try:
        engine = build_engine(config, loaded=loaded)
        if kept is not None:
            kept.facts, kept.were_kept = dict(engine.facts), loaded is not None
        yield engine
    except BaseException as error:
        if not isinstance(error, HARMLESS):
            kept = None
        raise
    finally:
        loaded = loaded if engine is None else engine.loaded
        if engine is not None:
            engine.close()
        if kept is not None and loaded is not None:
            kept.leave(loaded)
