"""JSON of answers and events, as clients split it."""

import asyncio
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`")


def test_text_of_an_event_is_one_line_to_every_client():
    from framework.server.streaming import event

    text = "".join(map(chr, range(0x3000)))
    told = event({"text": text})
    assert told.endswith("\n\n") and len(told.splitlines()) == 2
    assert json.loads(told.removeprefix("data: ")) == {"text": text}


class Stream:
    """Outputs that all come one by one, for whoever drives it as well."""

    def __init__(self, names):
        self._left = [SimpleNamespace(name=name, error=None, finished=False) for name in names]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)

    def waiting(self):
        return []

    async def drive(self, tell):
        while self._left and tell(self._left[0]):
            self._left.pop(0)

    async def aclose(self):
        pass


class Writer:
    def begin(self):
        return "begin "

    def write(self, placed):
        return "".join(output.name for _, output in placed)

    def end(self):
        return "end "


@pytest.mark.parametrize(
    ("busy_at", "sent", "by_chunks"),
    [
        (None, ["begin a", "end "], ["b", "c", "d", "e"]),
        (3, ["begin a", "d", "end "], ["b", "c", "e"]),  # whose reader is behind: that one waits for `send`
    ],
)
def test_events_behind_the_first_go_the_short_way_while_it_is_free(busy_at, sent, by_chunks):
    from framework.server.corked import CHUNKS
    from framework.server.service import Load
    from framework.server.streaming import DONE, EventStream

    class Chunks:
        @property
        def is_free(self):
            nonlocal busy_at
            is_free = len(told) + 1 != busy_at
            busy_at = busy_at if is_free else None
            return is_free

        def write(self, data):
            told.append(data.decode())

    async def send(message):
        messages.append(message)

    async def receive():
        await asyncio.sleep(60)

    told, messages = [], []
    llm = SimpleNamespace(generate=lambda *_: Stream("abcde"))
    options = SimpleNamespace(request_timeout=None)
    service = SimpleNamespace(llm=llm, load=Load(), most_open=1, options=options)
    asked = SimpleNamespace(num_completions=1, streams=lambda llm: [llm.generate()])
    answer = EventStream(service, asked, Writer())
    asyncio.run(answer({"extensions": {CHUNKS: Chunks()}}, receive, send))
    assert messages.pop(0)["type"] == "http.response.start"
    assert [message["body"].decode().removesuffix(DONE) for message in messages] == sent
    assert told == by_chunks
