"""The process that an engine was made in. A fork has copies of its memory and none of its threads, so there the engine
is refused by name; who asks and what for is not here. Held by `LLM`, `AsyncLLM` and `Engine`.
"""

from __future__ import annotations

import os


class HomeProcess:
    """This process. name: what is made here, as errors call it."""

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def refuse_elsewhere(self) -> None:
        """RuntimeError in a fork: a lock that was held stays so there, and nobody does what a thread is asked for."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this {self._name} was made in process {self._pid}, and this is process {os.getpid()}, a fork of it "
                "without its threads; make one here"
            )
