"""Compilations beside the steps: each constraint once, by whoever asks first, kept while it is in use.

Knows no request. `framework.structured.grammars` asks; the threads end with the engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from framework.interfaces import CompiledGrammar, GrammarSpec

NUM_THREADS = 2
"""A constraint that takes long does not hold up one that is quick."""


class Compiler:
    """Calls `compile` on threads of its own. max_kept: compilations that stay for later requests, those used last."""

    def __init__(self, compile: Callable[[GrammarSpec], CompiledGrammar], max_kept: int) -> None:
        self._compile, self._max_kept = compile, max_kept
        self._threads = ThreadPoolExecutor(NUM_THREADS, "framework-grammar")
        self._kept: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The compilation of `spec`, done or under way. One that failed is tried anew."""
        with self._lock:
            future = self._kept.get(spec)
            if future is None or (future.done() and future.exception() is not None):
                future = self._kept[spec] = self._threads.submit(self._compile, spec)
            self._kept.move_to_end(spec)
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)  # requests that wait for it have the future
        return future

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether somebody has asked for it, and it has not been dropped since."""
        return spec in self._kept

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
