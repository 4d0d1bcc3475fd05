"""The contract suite of observers: built without arguments, asked for what there is to hear, and never in the way.

Each function of `CHECKS` takes an `ObserverCase`. Called by `run=check` and by tests.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config import Config, EngineOptions, KVCacheConfig, ModelConfig
from framework.engine.build import build_engine
from framework.plugins import EVENTS, EventBus, registry
from framework.request import SamplingParams
from framework.testing.byte_model import quiet, save_byte_model
from framework.testing.checking import assert_all


@dataclass(frozen=True)
class ObserverCase:
    """The observer is built as target()."""

    target: Any

    @property
    def name(self) -> str:
        return str(self.target.__name__)


def check_it_is_built_without_arguments(case: ObserverCase) -> None:
    try:
        case.target()
    except TypeError as error:
        raise AssertionError(f"{case.name}: is built as {case.name}(), and raises {error}") from error


def check_it_hears_something(case: ObserverCase) -> None:
    """One event or more, each with all of its arguments."""
    observer = case.target()
    heard = [event for event in EVENTS if callable(getattr(observer, event, None))]
    assert heard, f"{case.name}: has none of {', '.join(EVENTS)}"
    for event in heard:
        try:
            inspect.signature(getattr(observer, event)).bind(*EVENTS[event])
        except TypeError as error:
            raise AssertionError(f"{case.name}: {event} must take ({', '.join(EVENTS[event])}): {error}") from error
    unknown = [name for name in dir(observer) if name.startswith("on_") and name not in EVENTS]
    assert not unknown, f"{case.name}: {', '.join(unknown)} is no event. Events: {', '.join(EVENTS)}"


def check_it_hears_requests_to_their_end(case: ObserverCase) -> None:
    """A run of three requests, one of them aborted, raises nothing and gives the tokens that it gives without."""
    observer = _Raising(case.target())
    observed = _tokens(observer)
    assert not observer.raised, f"{case.name}: raises {observer.raised[0]!r}, and an engine drops it for that"
    assert observed == _tokens(None), f"{case.name}: tokens depend on who observes"


class _Raising:
    """Notes what an observer raises, since an engine drops it and goes on."""

    def __init__(self, observer: Any) -> None:
        self.raised: list[BaseException] = []
        for event in EVENTS:
            if callable(getattr(observer, event, None)):
                setattr(self, event, self._noting(getattr(observer, event)))

    def _noting(self, method: Any) -> Any:
        def noting(*values: Any) -> None:
            try:
                method(*values)
            except Exception as error:
                self.raised.append(error)

        return noting


class _Observed:
    """A registry whose engines are heard by one observer alone."""

    def __init__(self, observer: _Raising | None) -> None:
        self._plugins = registry()
        self.events = EventBus() if observer is None else EventBus().joined("check", _Closable(observer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)


class _Closable:
    """What joins a bus has something to close."""

    def __init__(self, observer: _Raising) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def close(self) -> None:
        """An observer ends with its process."""


def _tokens(observer: _Raising | None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        model = save_byte_model(Path(folder))
        config = Config(
            model=ModelConfig(path=str(model)),
            engine=EngineOptions(dtype="float32", async_scheduling=False),
            kv_cache=KVCacheConfig(num_blocks=40),
        )
        plugins: Any = _Observed(observer)
        engine = build_engine(config, plugins)
        try:
            for number in range(3):
                engine.add_request(str(number), [1 + number, 2], SamplingParams(seed=number, max_tokens=6))
            engine.step()
            engine.abort("1")
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[output.request_id] = output.outputs[0].token_ids
        finally:
            engine.close()
    return found


CHECKS = (check_it_is_built_without_arguments, check_it_hears_something, check_it_hears_requests_to_their_end)


def check_observer(case: ObserverCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
