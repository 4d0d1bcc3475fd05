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


class Writer:
    def begin(self):
        return "begin "

    def write(self, placed):
        return "".join(output.outputs[0].text for _, output in placed)

    def end(self):
        return "end "


class Chunks:
    """Not free when the first of them would be number `busy_at`."""

    def __init__(self, busy_at):
        self.told, self._busy_at = [], busy_at

    @property
    def is_free(self):
        is_busy = len(self.told) + 1 == self._busy_at
        if is_busy:
            self._busy_at = None
        return not is_busy

    def write(self, data):
        self.told.append(data.decode())


async def answered(words, scope):
    """What a stream of these outputs sends, which come one by one."""
    from framework.engine.aio import AsyncStream
    from framework.engine.inbox import Inbox, Listener
    from framework.request import CompletionOutput, RequestMetrics, RequestOutput
    from framework.server.service import Load
    from framework.server.streaming import EventStream

    async def send(message):
        messages.append(message)

    async def receive():
        await asyncio.sleep(60)

    messages = []
    stream = AsyncStream(SimpleNamespace(_post=lambda *_: None, _leave=None), None, None, "one")
    stream._listener = Listener(Inbox(asyncio.get_running_loop()))
    options = SimpleNamespace(request_timeout=None)
    service = SimpleNamespace(llm=None, load=Load(), most_open=1, options=options)
    asked = SimpleNamespace(num_completions=1, streams=lambda _: [stream])
    answer = asyncio.create_task(EventStream(service, asked, Writer())(scope, receive, send))
    for place, word in enumerate(words, 1):
        outputs = [CompletionOutput(0, word, [place])]
        output = RequestOutput("one", None, [1], None, outputs, place == len(words), 0, RequestMetrics(0.0))
        stream._listener.inbox.put([(stream._listener, output)])
        await asyncio.sleep(0.005)
    await answer
    return messages


@pytest.mark.parametrize(
    ("busy_at", "sent", "by_chunks"),
    [
        (None, ["begin a", "e", "end "], ["b", "c", "d"]),
        (2, ["begin a", "c", "e", "end "], ["b", "d"]),  # whose reader is behind: that one waits for `send`
    ],
)
def test_events_behind_the_first_go_the_short_way_while_it_is_free(busy_at, sent, by_chunks):
    from framework.server.corked import CHUNKS
    from framework.server.streaming import DONE

    chunks = Chunks(busy_at)
    start, *messages = asyncio.run(answered("abcde", {"extensions": {CHUNKS: chunks}}))
    assert start["type"] == "http.response.start"
    assert [message["body"].decode().removesuffix(DONE) for message in messages] == sent
    assert chunks.told == by_chunks


@pytest.mark.parametrize("scope", [{}, {"extensions": None}, {"extensions": {}}])
def test_where_a_server_has_no_short_way_every_event_is_sent(scope):
    from framework.server.streaming import DONE

    _, *messages = asyncio.run(answered("abc", scope))
    assert [message["body"].decode().removesuffix(DONE) for message in messages] == ["begin a", "b", "c", "end "]
