"""`llm.generate(stream=True)`: outputs of one call as they are made, for a caller that iterates in its own thread.

Steps the engine when it is asked for an output and has none. What other callers of the engine are owed goes back to it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from framework.engine.interrupt import between_steps
from framework.request import RequestOutput

if TYPE_CHECKING:
    from types import TracebackType

    from framework.engine.llm import LLM


class OutputStream(Iterator[RequestOutput]):
    """RequestOutputs of the requests `ids` in the order in which they are made; ends when all of them are finished.

    Left early, by `close`, the end of its `with`, an error or its end of life, it aborts what still runs.
    """

    def __init__(self, llm: LLM, ids: Sequence[str]) -> None:
        self._llm = llm
        self._open = set(ids)
        self._ready = deque[RequestOutput]()

    def __next__(self) -> RequestOutput:
        try:
            with self._llm._turn(), between_steps() as interrupted:
                while not self._ready and self._open:
                    interrupted()
                    self._step()
        except BaseException:
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _step(self) -> None:
        engine, others = self._llm.engine, list[RequestOutput]()
        for output in engine.step():
            (self._ready if output.request_id in self._open else others).append(output)
        self._open -= {output.request_id for output in self._ready if output.finished}
        engine.put_back(others)
        if not self._ready and not any(engine.is_running(i) for i in self._open):
            raise RuntimeError(f"{len(self._open)} requests of this stream were aborted from elsewhere")

    def close(self) -> None:
        """Aborts what still runs; the stream is at its end afterwards. May be called again."""
        left, self._open = self._open, set()
        self._ready.clear()
        self._llm._abandon(left)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the engine's threads have ended by then
            self.close()
