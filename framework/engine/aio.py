"""The async API: one engine, driven by a thread of its own, and an async iterator for each request.

Knows event loops and threads, and nothing of what an engine does. Everything the engine is asked for is a task of that
thread, steps included: they are taken in order, and no loop of ours has to be ended.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from framework.engine.arguments import resolve_config, streaming_params
from framework.engine.build import build_engine
from framework.engine.home import HomeProcess
from framework.engine.inbox import Due, Event, Inbox, Listener
from framework.request import RequestOutput, SamplingParams
from framework.worker.task_thread import TaskThread

if TYPE_CHECKING:
    from types import TracebackType

    from framework.config import Config
    from framework.engine.admission import Admission
    from framework.engine.engine import Engine

_T = TypeVar("_T")


class AsyncStream(AsyncIterator[RequestOutput]):
    """Outputs of one request, which begins with the first `__anext__`.

    An object with an end of life, and not an async generator: what is broken off is aborted at once, and not when the
    event loop comes to it.
    """

    def __init__(self, llm: AsyncLLM, prompt: Any, params: SamplingParams | None, request_id: str) -> None:
        self._llm, self._request = llm, (request_id, prompt, params)
        self._listener: Listener | None = None
        self._is_done = False

    async def __anext__(self) -> RequestOutput:
        if self._is_done:
            raise StopAsyncIteration
        try:
            event = await self._next()
        except BaseException:
            self._leave()
            raise
        self._is_done = event.finished
        return event

    async def _next(self) -> RequestOutput:
        if self._listener is None:
            self._listener = Listener(self._llm._inbox())
            await self._llm._prepare(self._request[2])
            # in the caller's context: an observer of requests may look who asks, as tracing does
            await self._llm._ask(copy_context().run, self._llm._add, *self._request, self._listener)
        event = await self._listener.queue.get()
        if isinstance(event, BaseException):
            raise RuntimeError(f"request {self._request[0]} ended with the step that it ran in: {event}") from event
        return event

    def waiting(self) -> list[RequestOutput]:
        """Outputs that are there already and were not read yet, which a reader who is behind takes in one go."""
        outputs: list[RequestOutput] = []
        queue = None if self._listener is None else self._listener.queue
        while queue and not self._is_done and not queue.empty():
            event = queue.get_nowait()
            if isinstance(event, BaseException):
                queue.put_nowait(event)  # for `__anext__` to raise: nothing comes behind it
                break
            outputs.append(event)
            self._is_done = event.finished
        return outputs

    async def drive(self, tell: Callable[[RequestOutput], bool]) -> None:
        """Calls `tell` with each output that comes, on the loop, up to one that is read next: the last one, a failure,
        one for which `tell` answers False or raises, or one for which the loop is behind. Returns at once where some
        wait already.

        For the reader of a stream that has begun. It saves that a task takes its turn for each output, which is more
        than many do with one. Raises what `tell` raises, whose context is not the caller's.
        """
        listener = self._listener
        assert listener is not None, "a stream is driven behind its first output"
        if self._is_done or not listener.queue.empty():
            return
        ended: asyncio.Future[BaseException | None] = listener.inbox.loop.create_future()

        def take(event: Event, is_behind: bool) -> bool:
            if ended.done():  # and whoever drives has had no turn since, or is cancelled
                return False
            is_taken, failure = False, None
            try:
                if isinstance(event, RequestOutput) and not event.finished and not is_behind:
                    is_taken = tell(event)
            except BaseException as error:
                failure = error
            if not is_taken and not ended.done():  # `tell` may have cancelled it
                ended.set_result(failure)
            return is_taken

        listener.take = take
        try:
            failure = await ended
        finally:
            listener.take = None
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        """Aborts what still runs; the stream is at its end afterwards. May be called again."""
        self._leave()

    def _leave(self) -> None:
        if not self._is_done and self._listener is not None:
            self._llm._post(self._llm._leave, self._request[0], self._listener)
        self._is_done = True

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the engine's thread has ended by then
            self._leave()


class AsyncLLM:
    """An engine for asyncio. Arguments and errors are those of `LLM`; usable with `with` and `async with`.

    Any number of streams run at a time, in one event loop or in several. A step that fails ends the streams of the
    requests that ran in it with a RuntimeError whose cause is the step's; those that wait for their turn go on.
    As an `LLM` it serves the process that made it, and no fork of that one.
    """

    def __init__(
        self, model: str | None = None, *, overrides: Sequence[str] = (), config: Config | None = None
    ) -> None:
        config = resolve_config(model, overrides, config)
        self._ids = count()
        self._listeners: dict[str, Listener] = {}
        self._inboxes: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, Inbox] = weakref.WeakValueDictionary()
        self._is_stepping = False  # a step is queued; read and written by the engine's thread alone
        self._is_closed = False
        self._home = HomeProcess("AsyncLLM")
        self._thread = TaskThread("framework-engine")
        try:
            self._engine = self._thread.submit(build_engine, config).result()
        except BaseException:
            self._thread.stop()
            raise
        weakref.finalize(self, self._thread.stop)  # before the threads of the engine, which steps need, end themselves

    def generate(self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None) -> AsyncStream:
        """Outputs of one request as they are made: of the kind that `params` names, else cumulative.

        prompt      one prompt in any of its forms: str, list of ids, dict
        params      None = the configured defaults
        request_id  None = one that is free
        Breaking off or cancelling aborts the request. What `LLM.generate` would raise is raised at the first output.
        """
        self._home.refuse_elsewhere()
        return AsyncStream(self, prompt, params, self._new_id() if request_id is None else request_id)

    @property
    def admission(self) -> Admission:
        """What checks prompts and parameters, with the tokenizer and the limits: for reading, by any thread."""
        if self._is_closed:
            raise RuntimeError("this AsyncLLM is closed; make another one")
        return self._engine.admission

    @property
    def is_usable(self) -> bool:
        """Whether requests can run: False once it is closed, or a step has failed past recovery. Waits for no step."""
        return not self._is_closed and self._engine.is_usable

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gives a last output with finish_reason `abort`. Unknown ids do nothing."""
        await self._ask(self._abort, request_id)

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine, between two steps."""
        return await self._ask(lambda: self._engine.stats())

    async def ask(self, function: Callable[[Engine], _T]) -> _T:
        """What `function` answers of the engine: it is called on the engine's thread between two steps, which wait for
        it. It must change nothing; what it raises is raised here."""
        return await self._ask(lambda: function(self._engine))

    async def observe(self, label: str, observer: Any) -> None:
        """Lets an observer hear this engine, from the next step on: see `Engine.observe`. It is called on the engine's
        thread, between two steps, which wait for it."""
        await self._ask(lambda: self._engine.observe(label, observer))

    def close(self) -> None:
        """Aborts what runs, which ends its streams, and frees the model. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            if not self._home.is_here:
                return
            self._thread.submit(self._close).result()
            self._thread.stop()
            del self._engine

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _new_id(self) -> str:
        return next(i for i in map(str, self._ids) if i not in self._listeners)

    def _inbox(self) -> Inbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.get(loop)
        if inbox is None:
            inbox = self._inboxes[loop] = Inbox(loop)
        return inbox

    async def _prepare(self, params: SamplingParams | None) -> None:
        """Builds the grammar for the first request that has a constraint, beside the steps of others."""
        if self._is_closed or not self._home.is_here:
            return  # `_ask` refuses it
        admission = self._engine.admission
        asked = getattr(admission.defaults if params is None else params, "structured_outputs", None)
        if asked is not None and not admission.grammars.is_built:
            await asyncio.get_running_loop().run_in_executor(None, admission.grammars.build)

    async def _ask(self, function: Callable[..., _T], *args: Any) -> _T:
        self._home.refuse_elsewhere()
        if self._is_closed:
            raise RuntimeError("this AsyncLLM is closed; make another one")
        return await asyncio.wrap_future(self._thread.submit(function, *args))

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        """Asks for something that nobody waits for; nothing is left to do once the engine or the interpreter ends."""
        if not self._home.is_here:
            return
        with suppress(RuntimeError):  # the thread was stopped
            self._thread.submit(function, *args)

    # ------------------------------------------------------------------------------------- on the engine's thread

    def _add(self, name: str, prompt: Any, params: Any, listener: Listener) -> None:
        params = streaming_params(params, self._engine.admission.defaults)
        self._engine.add_request(name, prompt, params, asked_at=listener.asked_at)
        self._listeners[name] = listener
        self._go_on()

    def _leave(self, name: str, listener: Listener) -> None:
        """The listener has gone. One of a refused request never came, and its id may be somebody else's."""
        if self._listeners.get(name) is listener:
            del self._listeners[name]
            self._abort(name)

    def _abort(self, name: str) -> None:
        self._deliver(self._engine.end(name))

    def _go_on(self) -> None:
        if not self._is_stepping and self._engine.has_unfinished_requests():
            self._is_stepping = True
            self._post(self._step)  # behind what was asked for meanwhile

    def _step(self) -> None:
        self._is_stepping = False
        try:
            outputs = self._engine.step()
        except BaseException as error:
            self._deliver(self._engine.leftovers())
            self._fail(error, [name for name in self._listeners if not self._engine.is_running(name)])
        else:
            self._deliver(outputs)
        self._go_on()

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hands outputs to the loops that wait for them, one call a loop.

        First outputs are a batch of their own, before the others: whoever has nothing yet would wait until all the
        others have written what they have.
        """
        due: dict[Inbox, tuple[list[Due], list[Due]]] = defaultdict(lambda: ([], []))
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is not None:
                due[listener.inbox][listener.has_begun].append((listener, output))
                listener.has_begun = True
                if output.finished:
                    del self._listeners[output.request_id]
        for inbox, batches in due.items():
            self._hand_over(inbox, *filter(None, batches))

    def _fail(self, error: BaseException, names: Iterable[str]) -> None:
        for name in names:
            listener = self._listeners.pop(name, None)  # None: its loop was found closed with one before it
            if listener is not None:
                self._hand_over(listener.inbox, [(listener, error)])

    def _hand_over(self, inbox: Inbox, *batches: Sequence[Due]) -> None:
        try:
            inbox.put(*batches)
        except RuntimeError:  # the loop is closed, with everybody who waited in it
            gone = [(name, listener) for name, listener in self._listeners.items() if listener.inbox is inbox]
            for name, listener in gone:
                self._leave(name, listener)

    def _close(self) -> None:
        try:
            for name in list(self._listeners):
                self._abort(name)
        finally:
            self._fail(RuntimeError("the AsyncLLM was closed"), list(self._listeners))
            self._engine.close()
