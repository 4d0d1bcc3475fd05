"""A thread that does what it is given, one task after the other. What the tasks are is its owner's business.

It differs from a thread pool of one in how it ends: as a daemon it holds no interpreter up, and it is ended and waited
for when its owner forgets it or the interpreter exits, so that nothing native is cut in the middle. And it takes no
arena of its own to allocate in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from framework.worker.arena import share_main_arena

_T = TypeVar("_T")
_Task = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class TaskThread:
    """Takes tasks from any thread. Those that were given before `stop` are done, later ones are refused."""

    def __init__(self, name: str) -> None:
        share_main_arena()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._lock = threading.RLock()  # a task may be given by an object's end of life, in the middle of `submit`
        self._end = weakref.finalize(self, _stop, self._tasks, thread)  # at the interpreter's exit as well
        thread.start()

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """A future of function(*args). Raises RuntimeError once the thread was stopped."""
        future: Future[_T] = Future()
        with self._lock:  # nothing is queued behind the end
            if not self._end.alive:
                raise RuntimeError("this thread was stopped and takes no more tasks")
            self._tasks.put((function, args, future))
        return future

    def stop(self) -> None:
        """Waits for the tasks so far and ends the thread. May be called again, and from a task."""
        with self._lock:
            end = self._end.detach()
        if end is not None:
            _, function, args, _ = end
            function(*args)


def _stop(tasks: SimpleQueue[_Task | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        function, args, future = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del task, function, args, future  # while it waits it keeps nobody alive
        result = None
