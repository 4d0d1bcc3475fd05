"""AsyncLLM: many generators at a time in event loops, and nothing that hangs or stays however they end."""

import asyncio
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from itertools import count

import pytest

from framework import AsyncLLM, SamplingParams
from framework.engine.inbox import Inbox
from framework.errors import CheckpointError, ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=50)
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=3", "kv_cache.num_blocks=17"]
TIMEOUT_S = 100  # nothing comes near it: it turns a hang into a failure


@pytest.fixture(scope="module", params=["false", "true"], ids=["sync", "async"])
def llm(request, folder):
    with AsyncLLM(folder, overrides=[*WORDS, f"engine.async_scheduling={request.param}"]) as made:
        yield made


def run(main):
    return asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


async def collect(llm, prompt, params=GREEDY, request_id=None):
    return [o async for o in llm.generate(prompt, params, request_id)]


async def last(llm, prompt, params=GREEDY, request_id=None):
    return (await collect(llm, prompt, params, request_id))[-1].outputs[0]


async def assert_drained(llm):
    stats = await llm.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    assert not llm._listeners


def counted(start, count):
    return [(start + i) % 20 for i in range(1, count + 1)]


def test_outputs_are_cumulative_unless_the_parameters_name_a_kind(llm):
    async def main():
        kinds = {kind: await collect(llm, [4], GREEDY.replace(output_kind=kind)) for kind in ("delta", "final")}
        return {"unnamed": await collect(llm, [4], GREEDY), **kinds}

    found = {kind: [o.outputs[0].token_ids for o in outputs] for kind, outputs in run(main()).items()}
    assert found == {
        "unnamed": [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]],
        "delta": [[5], [6], [7], [8]],
        "final": [[5, 6, 7, 8]],
    }


def test_first_outputs_are_a_batch_of_their_own_before_the_others(llm, monkeypatch):
    handed = []

    def noted(inbox, *batches):
        handed.append([[output.request_id for _, output in batch] for batch in batches])
        return put(inbox, *batches)

    async def main():
        early = asyncio.create_task(collect(llm, [4], LONG, "early"))
        while not handed:
            await asyncio.sleep(0.001)
        await collect(llm, [5], GREEDY, "late")
        await early

    put = Inbox.put
    monkeypatch.setattr(Inbox, "put", noted)
    run(main())
    together = [batches for batches in handed if sum(map(len, batches)) > 1]
    assert together[0] == [["late"], ["early"]] and together[1] == [["early", "late"]]


@pytest.fixture
def paced(llm, monkeypatch):
    """Runs a coroutine beside which a step begins every other millisecond of the loop: readers are never behind."""
    gate, step = threading.Semaphore(0), llm._engine.step

    def waiting():
        gate.acquire(timeout=TIMEOUT_S)
        return step()

    async def pace():
        while True:
            gate.release()
            await asyncio.sleep(0.002)

    async def beside(main):
        pacer = asyncio.create_task(pace())
        try:
            return await main
        finally:
            pacer.cancel()
            monkeypatch.undo()
            gate.release(1000)
            await assert_drained(llm)

    monkeypatch.setattr(llm._engine, "step", waiting)
    return lambda main: run(beside(main))


def tokens_of(output):
    return list(output.outputs[0].token_ids)


def test_a_driven_stream_tells_its_outputs_as_they_come_up_to_the_last_one(llm, paced):
    async def main():
        stream, tokens, num_told = llm.generate([4], LONG.replace(output_kind="delta")), [], 0

        def tell(output):
            nonlocal num_told
            num_told += 1
            tokens.extend(tokens_of(output))
            return True

        async for output in stream:
            tokens += tokens_of(output)
            await stream.drive(tell)
        await stream.drive(lambda output: pytest.fail("it is at its end"))
        return tokens, num_told

    tokens, num_told = paced(main())
    assert tokens == counted(4, 50) and num_told > 25


def test_an_output_that_is_not_taken_is_read_next(llm, paced):
    async def main():
        stream, tokens, num_refused = llm.generate([4], LONG.replace(output_kind="delta")), [], 0

        def tell(output):
            nonlocal num_refused
            if len(tokens) % 5 == 0:
                num_refused += 1
                return False
            tokens.extend(tokens_of(output))
            return True

        async for output in stream:
            tokens.extend(tokens_of(output))
            await stream.drive(tell)
        return tokens, num_refused

    tokens, num_refused = paced(main())
    assert tokens == counted(4, 50) and num_refused > 3


def test_outputs_that_wait_already_are_not_passed_over(llm):
    async def main():
        stream, told = llm.generate([4], GREEDY.replace(output_kind="delta")), []
        await anext(stream)
        while llm._listeners:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await stream.drive(lambda output: told.append(output) or True)
        return told, [tokens_of(output) async for output in stream]

    assert run(main()) == ([], [[6], [7], [8]])


def test_what_tell_raises_ends_the_drive_and_the_output_is_there(llm, paced):
    async def main():
        stream = llm.generate([4], LONG.replace(output_kind="delta"))
        tokens, num_raised = [], 0
        async for output in stream:
            tokens += tokens_of(output)
            try:
                await stream.drive(lambda output: 1 // 0)
            except ZeroDivisionError:
                num_raised += 1
        return tokens, num_raised

    tokens, num_raised = paced(main())
    assert tokens == counted(4, 50) and num_raised > 25


def test_a_drive_that_is_cancelled_leaves_nothing(llm, paced):
    async def main():
        async def read():
            stream = llm.generate([4], LONG)
            try:
                async for _ in stream:
                    await stream.drive(lambda output: task.cancel() or True)
            finally:
                await stream.aclose()

        task = asyncio.create_task(read())
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await last(llm, [7])).token_ids

    assert paced(main()) == [8, 9, 10, 11]


def test_default_parameters_and_ids_of_its_own(llm):
    async def main():
        first, second = await asyncio.gather(collect(llm, [4], None), collect(llm, [5], None))
        return first[-1], second[-1]

    first, second = run(main())
    assert first.finished and second.finished and first.request_id != second.request_id
    assert len(first.outputs[0].token_ids) == 16


def test_ask_calls_a_function_with_the_engine_on_its_thread(llm):
    async def main():
        return await llm.ask(lambda engine: (engine.facts["block_size"], threading.current_thread().name))

    assert run(main()) == (16, "framework-engine")


def test_many_generators_of_one_loop_have_the_tokens_of_each_alone(llm):
    async def main():
        outputs = await asyncio.gather(*(last(llm, [i], LONG if i % 3 else GREEDY) for i in range(20)))
        await assert_drained(llm)
        return outputs

    for i, output in enumerate(run(main())):
        assert output.token_ids == counted(i, 50 if i % 3 else 4)


def test_loops_of_several_threads_share_an_engine(llm):
    found = {}

    def work(start):
        async def main():
            return await asyncio.gather(last(llm, [start], LONG), last(llm, [start + 1]))

        found[start] = [o.token_ids for o in run(main())]

    threads = [threading.Thread(target=work, args=(start,)) for start in (2, 6, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == {start: [counted(start, 50), counted(start + 1, 4)] for start in (2, 6, 10)}


def test_cancelled_task_and_closed_generator_abort_their_requests_alone(llm):
    async def main():
        other = asyncio.create_task(last(llm, [9], LONG))
        task = asyncio.create_task(collect(llm, [4], LONG))
        async for output in llm.generate([5], LONG):
            if len(output.outputs[0].token_ids) == 3:
                break
        stream = llm.generate([6], LONG)
        await anext(stream)
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other).token_ids == counted(9, 50)
        await assert_drained(llm)

    run(main())


@pytest.mark.parametrize("turns", range(6))
def test_task_that_is_cancelled_while_it_is_admitted_leaves_nothing(llm, turns):
    async def main():
        task = asyncio.create_task(collect(llm, [4], LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_drained(llm)

    run(main())


def test_loop_that_ends_with_open_generators_leaves_nothing(llm):
    kept = []

    async def main():
        stream = llm.generate([4], LONG)
        kept.append(stream)
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()  # asyncio.run would have closed the generator
    assert run(last(llm, [5], LONG)).token_ids == counted(5, 50)
    run(assert_drained(llm))


def test_abort_by_id_ends_the_generator_with_its_tokens_so_far(llm):
    async def main():
        outputs = []
        async for output in llm.generate([4], LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 2:
                await llm.abort("mine")
                await llm.abort("nobody")
        await assert_drained(llm)
        return outputs[-1]

    output = run(main())
    completion = output.outputs[0]
    assert (output.finished, completion.finish_reason) == (True, "abort")
    assert 2 <= len(completion.token_ids) < 50 and completion.token_ids == counted(4, len(completion.token_ids))


def test_what_is_refused_is_raised_by_the_generator_alone(llm):
    async def main():
        other = asyncio.create_task(last(llm, [9], LONG, "taken"))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="'taken' is already running"):
            await collect(llm, [4], GREEDY, "taken")
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await collect(llm, [999])
        with pytest.raises(TypeError, match="sampling_params must be a SamplingParams"):
            await collect(llm, [4], {"n": 1})
        return await other

    assert run(main()).token_ids == counted(9, 50)


PLACES = {
    "forward": lambda engine: (
        getattr(engine.core.executor, "_executor", engine.core.executor)._runner.model,
        "forward",
    ),
    "schedule": lambda engine: (engine.core.scheduler, "schedule"),
    "update": lambda engine: (engine.core.scheduler, "update"),
    "output": lambda engine: (engine._outputs, "tell"),
}


def fail_at(number, owner, name, patch):
    """Makes the method's call of that number, the first being 1, raise a MemoryError."""
    function, calls = getattr(owner, name), count(1)

    def failing(*args):
        if next(calls) == number:
            raise MemoryError("no room")
        return function(*args)

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize("place", PLACES)
def test_step_that_fails_reaches_everybody_whose_request_ran_and_the_others_go_on(llm, monkeypatch, place):
    async def main():
        tasks = [asyncio.create_task(last(llm, [i], LONG)) for i in range(5)]  # three rows: two requests wait
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await assert_drained(llm)
        return results

    with monkeypatch.context() as patch:
        fail_at(3, *PLACES[place](llm._engine), patch)
        results = run(main())
    assert [isinstance(r, RuntimeError) and "no room" in str(r) for r in results] == [True] * 3 + [False] * 2
    assert all(isinstance(r.__cause__, MemoryError) for r in results[:3])
    assert [r.token_ids for r in results[3:]] == [counted(3, 50), counted(4, 50)]


def test_step_that_fails_reaches_a_live_loop_when_others_of_its_requests_were_of_a_closed_one(llm, monkeypatch):
    """Two of them, each of which is found gone with the first one."""
    gate, begun, ended, step = threading.Semaphore(0), [], [], llm._engine.step

    def gated():
        gate.acquire(timeout=TIMEOUT_S)
        return step()

    def pace():
        while len(begun) < 3:
            gate.release()
            time.sleep(0.01)

    def fail(*_):
        raise MemoryError("no room")

    async def read_first(number):
        stream = llm.generate([number], LONG)
        begun.append((await anext(stream), stream))
        return stream

    async def both():
        await asyncio.gather(read_first(4), read_first(5))

    async def live():
        try:
            async for _ in await read_first(6):
                pass
        except RuntimeError as error:
            ended.append(error)

    monkeypatch.setattr(llm._engine, "step", gated)
    loop, thread = asyncio.new_event_loop(), threading.Thread(target=run, args=(live(),))
    pacer = threading.Thread(target=pace)
    pacer.start()
    loop.run_until_complete(both())
    thread.start()  # behind them, so that it is the last one to be told
    pacer.join()
    loop.close()
    monkeypatch.setattr(*PLACES["forward"](llm._engine), fail)
    gate.release(5)
    thread.join(20)
    monkeypatch.undo()
    gate.release(1000)
    assert [str(error.__cause__) for error in ended] == ["no room"]
    assert run(last(llm, [7])).token_ids == [8, 9, 10, 11]
    run(assert_drained(llm))


def test_step_that_fails_ends_a_drive(llm, monkeypatch):
    async def main():
        stream, tokens = llm.generate([4], LONG.replace(output_kind="delta")), []
        with pytest.raises(RuntimeError, match="no room"):
            async for output in stream:
                tokens.extend(tokens_of(output))
                await stream.drive(lambda output: tokens.extend(tokens_of(output)) or True)
        await assert_drained(llm)
        return tokens

    with monkeypatch.context() as patch:
        fail_at(5, *PLACES["forward"](llm._engine), patch)
        tokens = run(main())
    assert 0 < len(tokens) < 5 and tokens == counted(4, len(tokens))


def test_close_ends_open_generators_and_says_so_afterwards(folder):
    async def main():
        async with AsyncLLM(folder, overrides=WORDS) as llm:
            tasks = [asyncio.create_task(last(llm, [i], LONG)) for i in range(5)]
            stream = llm.generate([7], LONG)
            await anext(stream)
        results = await asyncio.gather(*tasks)
        assert {o.finish_reason for o in results} <= {"abort", "length"}
        assert (await anext(o async for o in stream if o.finished)).outputs[0].finish_reason in ("abort", "length")
        llm.close()
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            await collect(llm, [4])

    run(main())


def test_arguments_are_checked_as_those_of_llm(folder):
    with pytest.raises(ConfigError, match=r"engine\.max_model_len"):
        AsyncLLM(folder, overrides=["engine.max_model_len=1"])
    with pytest.raises(TypeError, match="overrides must be a list of words"):
        AsyncLLM(folder, overrides="engine.seed=1")


@pytest.mark.parametrize("mode", ["false", "true"])
def test_interpreter_ends_without_close_while_requests_run(folder, mode):
    program = f"""
import asyncio
from framework import LLM, AsyncLLM, SamplingParams
words = {[*WORDS, f"engine.async_scheduling={mode}"]!r}
other = LLM({str(folder)!r}, overrides=words)
stream = other.generate([[4], [5]], SamplingParams(max_tokens=50), stream=True)
next(stream)
llm = AsyncLLM({str(folder)!r}, overrides=words)
kept = []
async def main():
    for i in range(4):
        kept.append(llm.generate([i], SamplingParams(max_tokens=50)))
        await anext(kept[-1])
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_engine_that_cannot_be_built_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    kept = None
    try:
        AsyncLLM(str(tmp_path / "nothing"))
    except CheckpointError as error:
        kept = error  # whose traceback holds what was half made
    assert kept is not None
    assert set(threading.enumerate()) <= before


class Heard:
    def __init__(self):
        self.added, self.num_steps, self.ended, self.threads, self.is_closed = [], 0, [], set(), False

    def on_request_added(self, request):
        self.added.append(request.request_id)

    def on_step_end(self, stats):
        self.num_steps += 1
        self.threads.add(threading.current_thread().name)

    def on_request_finished(self, request, output):
        self.ended.append(request.request_id)

    def close(self):
        self.is_closed = True


def test_observers_hear_one_engine_from_when_they_came_until_its_end(folder):
    first, second = Heard(), Heard()

    async def main():
        async with AsyncLLM(folder, overrides=WORDS) as llm, AsyncLLM(folder, overrides=WORDS) as other:
            await llm.observe("first", first)
            await last(llm, [4], request_id="a")
            await llm.observe("second", second)
            await last(llm, [4], request_id="b")
            await last(other, [4], request_id="c")
            assert not first.is_closed

    run(main())
    assert (first.added, second.added) == (["a", "b"], ["b"])
    assert (first.ended, second.ended) == (["a", "b"], ["b"])
    assert first.num_steps > second.num_steps >= 4 and first.threads == {"framework-engine"}
    assert first.is_closed and second.is_closed


def test_request_is_added_in_the_context_of_whoever_asks(llm):
    asker = ContextVar("asker", default="nobody")
    heard = {}

    class Listening:
        def on_request_added(self, request):
            heard[request.request_id] = asker.get()

    async def ask(name):
        asker.set(name)
        await collect(llm, [4], request_id=name)

    async def main():
        await llm.observe("listening", Listening())
        await asyncio.gather(ask("a"), ask("b"))

    run(main())
    assert heard == {"a": "a", "b": "b"}


def test_times_of_a_request_count_from_when_it_was_asked_for_and_not_from_the_next_step(llm):
    """The engine's thread may be amid a step when somebody asks."""
    goes_on = threading.Event()

    async def main():
        busy = asyncio.ensure_future(llm.ask(lambda engine: goes_on.wait(TIMEOUT_S)))
        asked = asyncio.ensure_future(collect(llm, [4]))
        before = time.time()
        await asyncio.sleep(0.1)
        goes_on.set()
        await busy
        return (await asked)[-1].metrics, before

    metrics, before = run(main())
    assert metrics.ttft >= metrics.queue_time >= 0.1
    assert metrics.arrival_time == pytest.approx(before, abs=0.09)
