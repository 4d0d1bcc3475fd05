"""The engine's side of one HTTP request: its prompts as streams of the engine, read whole or piece by piece.

Breaking off aborts what runs. An output that says it failed is raised as an error; nothing is known of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.request import RequestOutput, SamplingParams
from framework.server.errors import ApiError

if TYPE_CHECKING:
    from framework.engine.admission import Prompt
    from framework.engine.aio import AsyncLLM, AsyncStream

Placed = tuple[int, RequestOutput]
"""An output with the index of its prompt."""


@dataclass(frozen=True)
class Asked:
    """What one HTTP request asks the engine for: the same parameters for each of its prompts."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.params.n

    def streams(self, llm: AsyncLLM) -> list[AsyncStream]:
        """One a prompt; nothing runs before they are read."""
        if len(self.prompts) == 1:
            return [llm.generate(self.prompts[0], self.params, self.request_id)]
        named = enumerate(self.prompts)
        return [llm.generate(prompt, self.params, f"{self.request_id}-{at}") for at, prompt in named]


async def wholes(llm: AsyncLLM, asked: Asked) -> list[RequestOutput]:
    """The finished outputs, in the order of the prompts. Raises what the first one to fail ended with."""
    streams = asked.streams(llm)
    if len(streams) == 1:
        return [await _whole(streams[0])]
    tasks = [asyncio.create_task(_whole(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _ended(tasks)


async def _whole(stream: AsyncStream) -> RequestOutput:
    try:
        async for output in stream:
            _check(output)
    finally:
        await stream.aclose()
    return output


async def pieces(
    llm: AsyncLLM, asked: Asked, tell: Callable[[list[Placed]], bool] | None = None
) -> AsyncGenerator[list[Placed]]:
    """What is new, as it comes; all that has come since the last time where the reader is behind.

    tell  takes the pieces of a single prompt behind the first one, as `AsyncStream.drive` says
    """
    streams = asked.streams(llm)
    if len(streams) > 1:
        async for several in _merged(streams):
            yield several
        return
    try:
        async for output in streams[0]:
            for told in _until_failed([(0, one) for one in (output, *streams[0].waiting())]):
                yield told
            if tell is not None:
                await streams[0].drive(lambda output: tell([(0, _check(output))]))
    finally:
        await streams[0].aclose()


async def _merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[list[Placed]]:
    queue: asyncio.Queue[Placed | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_fill(queue, place, stream)) for place, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            events = [await queue.get()]
            while not queue.empty():
                events.append(queue.get_nowait())
            left -= events.count(None)
            for told in _until_failed([event for event in events if event is not None]):
                yield told
    finally:
        await _ended(tasks)


def _until_failed(events: Iterable[Placed | Exception]) -> Iterator[list[Placed]]:
    """What came, in one list; of a failure among it what stands before it, and then the failure is raised."""
    told: list[Placed] = []
    try:
        for event in events:
            if isinstance(event, Exception):
                raise event
            told.append((event[0], _check(event[1])))
    finally:
        if told:
            yield told


async def _fill(queue: asyncio.Queue[Any], place: int, stream: AsyncStream) -> None:
    try:
        async for output in stream:
            queue.put_nowait((place, _check(output)))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
    finally:
        await stream.aclose()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what is left of them, and waits for it: their requests are aborted by then."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(BaseException):
            await task


def _check(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise ApiError(500, output.error, code="engine_error")
    if output.finished and any(one.finish_reason == "abort" for one in output.outputs):
        raise ApiError(503, "the request was aborted on the server", code="aborted")
    return output
