"""The process that an engine was made in. A fork has copies of its memory and none of its threads, so there the engine
is refused by name; who asks and what for is not here. Held by `LLM`, `AsyncLLM` and `Engine`.
"""

from __future__ import annotations

import os

_num_forks = 0
"""Forks between the process that began and this one. To ask for the process id instead is a call of the system, and
costs a step more than anything else that it asks."""


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class HomeProcess:
    """This process. name: what is made here, as errors call it."""

    def __init__(self, name: str) -> None:
        self._name, self._pid, self._num_forks = name, os.getpid(), _num_forks

    @property
    def is_here(self) -> bool:
        return self._num_forks == _num_forks

    def refuse_elsewhere(self) -> None:
        """RuntimeError in a fork: a lock that was held stays so there, and nobody does what a thread is asked for."""
        if self._num_forks != _num_forks:
            raise RuntimeError(
                f"this {self._name} was made in process {self._pid}, and this is process {os.getpid()}, a fork of it "
                "without its threads; make one here"
            )
