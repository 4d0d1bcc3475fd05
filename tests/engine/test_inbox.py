"""What a loop is told of outputs: in order, newcomers first, and nothing lost however a reader takes them."""

import asyncio
from types import SimpleNamespace

import pytest

from framework.engine.aio import AsyncStream
from framework.engine.inbox import Inbox, Listener
from framework.request import CompletionOutput, RequestMetrics, RequestOutput

TIMEOUT_S = 20  # nothing comes near it: it turns a hang into a failure


def out(token, *, finished=False):
    reason = "length" if finished else None
    one = CompletionOutput(0, f"{token} ", [token], finish_reason=reason)
    return RequestOutput("one", None, [1], None, [one], finished, 0, RequestMetrics(0.0))


class Reader:
    """Reads a stream of an inbox, driving it behind its first output, and notes (name, tokens, how)."""

    def __init__(self, inbox, name, notes, tell=None):
        self.name, self.notes = name, notes
        self.listener = Listener(inbox)
        self.stream = AsyncStream(SimpleNamespace(_post=lambda *_: None, _leave=None), None, None, name)
        self.stream._listener = self.listener
        self.tell = tell or self.note
        self.task = asyncio.create_task(self.read())

    def note(self, output, how="told"):
        self.notes.append((self.name, output.outputs[0].token_ids[0], how))
        return True

    async def read(self):
        async for output in self.stream:
            for each in (output, *self.stream.waiting()):
                self.note(each, "read")
            await self.stream.drive(self.tell)


def run(main):
    return asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


async def begun(*readers):
    """Each has read its first output, of token 0, and drives."""
    for reader in readers:
        reader.listener.queue.put_nowait(out(0))
    await turns()
    for reader in readers:
        assert reader.listener.take is not None
        reader.notes.clear()


async def turns():
    for _ in range(20):  # more than anything here takes
        await asyncio.sleep(0)


def test_outputs_are_told_as_they_come_and_the_last_one_is_read():
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        reader = Reader(inbox, "a", notes)
        await begun(reader)
        for token in (1, 2, 3):
            inbox.put([(reader.listener, out(token, finished=token == 3))])
            await turns()
        await reader.task
        return notes

    assert run(main()) == [("a", 1, "told"), ("a", 2, "told"), ("a", 3, "read")]


def test_readers_of_a_batch_have_their_turn_before_the_next_one_is_told():
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        others = [Reader(inbox, f"other {place}", notes) for place in range(5)]
        late = Reader(inbox, "late", notes)
        await begun(*others)
        inbox.put([(late.listener, out(7))], [(other.listener, out(1)) for other in others])
        await turns()
        return notes

    assert run(main()) == [("late", 7, "read"), *((f"other {place}", 1, "told") for place in range(5))]


def test_a_loop_that_is_behind_is_told_of_the_newest_batch_alone():
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        readers = [Reader(inbox, name, notes) for name in "ab"]
        await begun(*readers)
        for token in range(1, 5):  # before the loop has a turn
            inbox.put([(reader.listener, out(token)) for reader in readers])
        await turns()
        inbox.put([(reader.listener, out(5)) for reader in readers])
        await turns()
        return notes

    notes = run(main())
    for name in "ab":
        own = [(token, how) for who, token, how in notes if who == name]
        assert own == [(1, "read"), (2, "read"), (3, "read"), (4, "told"), (5, "told")]


def test_newcomers_are_first_where_the_loop_is_behind_as_well():
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        early, late = Reader(inbox, "early", notes), Reader(inbox, "late", notes)
        await begun(early)
        inbox.put([(early.listener, out(1))])
        inbox.put([(late.listener, out(7))], [(early.listener, out(2))])
        await turns()
        return notes

    assert run(main()) == [("early", 1, "read"), ("late", 7, "read"), ("early", 2, "told")]


def test_a_loop_that_is_too_slow_for_every_output_takes_several_in_one_go():
    """For each that it is told an engine makes one or two more: whoever is told all of them is ever later."""

    async def main():
        loop, notes, most = asyncio.get_running_loop(), [], 0
        inbox = Inbox(loop)
        made = 0

        def make():
            nonlocal made
            made += 1
            inbox.put([(reader.listener, out(made))])

        def slow(output):
            nonlocal most
            most = max(most, made - output.outputs[0].token_ids[0])
            for _ in range(1 + output.outputs[0].token_ids[0] % 2):
                make()
            return reader.note(output)

        reader = Reader(inbox, "a", notes, tell=slow)
        await begun(reader)
        make()
        while made < 100:
            await asyncio.sleep(0)
            if len(notes) == made:
                make()
        reader.task.cancel()
        return [token for _, token, _ in notes], most

    tokens, most = run(main())
    assert tokens == list(range(1, len(tokens) + 1)) and len(tokens) > 90
    assert most <= 3


def cancels(reader, output):
    reader.task.cancel()
    return reader.note(output)


def refuses(reader, output):
    reader.task.cancel()
    return False


def fails(reader, output):
    reader.task.cancel()
    raise ValueError("nothing is told")


def stops(reader, output):
    return next(iter(()))


@pytest.mark.parametrize("how", [cancels, refuses, fails, stops])
@pytest.mark.parametrize("finished", [False, True])
def test_whatever_one_reader_does_the_others_of_a_batch_are_told(how, finished):
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        bad = Reader(inbox, "bad", [], tell=lambda output: how(bad, output))
        good = Reader(inbox, "good", notes)
        await begun(bad, good)
        inbox.put([(bad.listener, out(1, finished=finished)), (bad.listener, out(2)), (good.listener, out(1))])
        await turns()
        inbox.put([(good.listener, out(2, finished=True))])
        await good.task
        await asyncio.gather(bad.task, return_exceptions=True)
        assert bad.listener.take is None
        return notes

    assert run(main()) == [("good", 1, "told"), ("good", 2, "read")]


def test_what_is_behind_an_output_that_was_not_taken_waits_for_the_reader():
    """Of one batch, before whoever drives has a turn."""

    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        reader = Reader(inbox, "a", notes, tell=lambda output: output.outputs[0].token_ids[0] != 2)
        await begun(reader)
        inbox.put([(reader.listener, out(token, finished=token == 4)) for token in (1, 2, 3, 4)])
        await reader.task
        return notes

    assert run(main()) == [("a", 2, "read"), ("a", 3, "read"), ("a", 4, "read")]


def test_what_tell_raises_is_raised_to_the_reader_and_the_output_is_read_next():
    async def main():
        inbox, notes = Inbox(asyncio.get_running_loop()), []
        reader = Reader(inbox, "a", notes, tell=lambda output: 1 // 0)
        await begun(reader)
        inbox.put([(reader.listener, out(1)), (reader.listener, out(2, finished=True))])
        with pytest.raises(ZeroDivisionError):
            await reader.task
        await reader.read()
        return notes

    assert run(main()) == [("a", 1, "read"), ("a", 2, "read")]


def test_closed_loops_refuse():
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    loop.close()
    with pytest.raises(RuntimeError):
        inbox.put([])
