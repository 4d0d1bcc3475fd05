"""Compilations beside the steps: each constraint once, by whoever asks first, kept while it is in use.

Knows no request. `framework.structured.grammars` asks; the threads end with the engine, and one that hangs in a
compilation does not keep the process from ending.
"""

from __future__ import annotations

import atexit
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias

from framework.interfaces import CompiledGrammar, GrammarSpec

_Compiling: TypeAlias = "Future[CompiledGrammar]"
_Tasks: TypeAlias = "SimpleQueue[tuple[_Compiling, GrammarSpec] | None]"

NUM_THREADS = 2
"""A constraint that takes long does not hold up one that is quick."""
EXIT_WAIT_S = 5.0
"""Longest wait for compilations under way when the process ends: foreign code is left running only when it hangs."""
_under_way: set[_Compiling] = set()


class Compiler:
    """Calls `compile` on threads of its own. max_kept: compilations that stay for later requests, those used last."""

    def __init__(self, compile: Callable[[GrammarSpec], CompiledGrammar], max_kept: int) -> None:
        self._compile, self._max_kept = compile, max_kept
        self._tasks: _Tasks = SimpleQueue()
        self._num_threads = 0
        self._kept: OrderedDict[GrammarSpec, _Compiling] = OrderedDict()
        self._lock = Lock()
        self._end = weakref.finalize(self, _end, self._tasks)

    def ask(self, spec: GrammarSpec) -> _Compiling:
        """The compilation of `spec`, done or under way. One that failed is tried anew."""
        with self._lock:
            future = self._kept.get(spec)
            if future is None or (future.done() and future.exception() is not None):
                future = self._kept[spec] = self._begin(spec)
            self._kept.move_to_end(spec)
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)  # requests that wait for it have the future
        return future

    def _begin(self, spec: GrammarSpec) -> _Compiling:
        assert self._end.alive, "a compiler that was closed is asked"
        future: _Compiling = Future()
        self._tasks.put((future, spec))
        if self._num_threads < NUM_THREADS:
            self._num_threads += 1
            name = f"framework-grammar_{self._num_threads - 1}"
            Thread(target=_work, args=(self._tasks, self._compile), name=name, daemon=True).start()
        return future

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether somebody has asked for it, and it has not been dropped since."""
        return spec in self._kept

    def close(self) -> None:
        """Cancels what has not begun. What is under way is not waited for."""
        self._end()


def _work(tasks: _Tasks, compile: Callable[[GrammarSpec], CompiledGrammar]) -> None:
    while (task := tasks.get()) is not None:
        _fulfil(*task, compile)
        del task  # while the thread waits for the next one
    tasks.put(None)  # for the other threads


def _fulfil(future: _Compiling, spec: GrammarSpec, compile: Callable[[GrammarSpec], CompiledGrammar]) -> None:
    _under_way.add(future)
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(compile(spec))
    except BaseException as error:  # whoever waits is told
        future.set_exception(error)
    finally:
        _under_way.discard(future)


def _end(tasks: _Tasks) -> None:
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            break
        if task is not None:
            task[0].cancel()
    tasks.put(None)


@atexit.register
def _wait_at_exit() -> None:
    wait(tuple(_under_way), EXIT_WAIT_S)
