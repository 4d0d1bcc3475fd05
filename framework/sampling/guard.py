"""A sampler stage whose errors say whose they are: what it raises becomes a `StageError` that names plugin and package.

Stands between the pipeline and a stage, and changes nothing of what the stage does. `deploy` puts it there; the engine
reads from the error which requests it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from framework.errors import FrameworkError, StageError, class_and_text


class GuardedStage:
    """`stage` with its `methods` guarded; everything else is the stage's own.

    key: its name in `sampler.stages`; label: as `Registry.label` calls its plugin.
    """

    def __init__(self, stage: Any, key: str, label: str, methods: Sequence[str]) -> None:
        self._stage, self._key, self._label = stage, key, label
        for name in methods:
            setattr(self, name, self._guarded(name, getattr(stage, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        # A stage refuses a request's parameters by a ValueError of `validate`; a TypeError there is its bug.
        own = (FrameworkError, ValueError) if name == "validate" else FrameworkError

        def guarded(*args: Any) -> Any:
            try:
                return method(*args)
            except own:
                raise
            except Exception as error:
                raise self._error(name, args, error) from error

        return guarded

    def _error(self, name: str, args: tuple[Any, ...], error: Exception) -> StageError:
        who = f"sampler stage '{self._key}' ({self._label})"
        message = f"{who} raised in {name}: {class_and_text(error)}"
        return StageError(message, self._key, args[2].request_id if name == "add_request" else None)
