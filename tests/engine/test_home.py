"""A fork of the process that made an engine: refused by name at every entry, and nothing there waits or harms."""

import subprocess
import sys

import pytest

TIMEOUT_S = 100  # nothing comes near it: it turns a hang into a failure
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=17"]
FORKING = """
import asyncio, os, signal, sys
from framework import LLM, AsyncLLM, SamplingParams

def in_child(action):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(50)
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(call, what):
    try:
        call()
    except RuntimeError as error:
        assert f"this {what} was made in process" in str(error) and "make one here" in str(error), error
    else:
        raise AssertionError("not refused")

GREEDY = SamplingParams(temperature=0, max_tokens=4)
"""
SYNC = """
llm = LLM({folder!r}, overrides={words!r})
llm.generate([4], GREEDY)
stream = llm.generate([[4], [5]], GREEDY, stream=True)
next(stream)

def child():
    refused(lambda: llm.generate([4], GREEDY), "LLM")
    refused(lambda: llm.generate([4], GREEDY, stream=True), "LLM")
    refused(lambda: next(stream), "LLM")
    refused(lambda: llm.reconfigure(["engine.seed=1"]), "LLM")
    refused(lambda: llm.engine.add_request("a", [4]), "engine")
    refused(lambda: llm.engine.step(), "engine")
    refused(lambda: llm.engine.abort("0"), "engine")
    stream.close()
    llm.engine.close()
    llm.close()

assert in_child(child) == 0
assert [o.request_id for o in stream if o.finished] == ["1", "2"]
assert llm.generate([4], GREEDY)[0].outputs[0].token_ids == [5, 6, 7, 8]
"""
ASYNC = """
llm = AsyncLLM({folder!r}, overrides={words!r})

async def collect(stream):
    return [o async for o in stream][-1].outputs[0].token_ids

async def main():
    assert await collect(llm.generate([4], GREEDY)) == [5, 6, 7, 8]

asyncio.run(main())
begun = llm.generate([5], GREEDY)

def child():
    refused(lambda: llm.generate([4], GREEDY), "AsyncLLM")
    refused(lambda: asyncio.run(collect(begun)), "AsyncLLM")
    refused(lambda: asyncio.run(llm.abort("0")), "AsyncLLM")
    refused(lambda: asyncio.run(llm.stats()), "AsyncLLM")
    with llm:
        pass

assert in_child(child) == 0
asyncio.run(main())
"""


@pytest.mark.parametrize("body", [SYNC, ASYNC], ids=["LLM", "AsyncLLM"])
@pytest.mark.parametrize("mode", ["false", "true"])
def test_fork_is_refused_by_name_at_every_entry_and_its_parent_goes_on(folder, body, mode):
    words = [*WORDS, f"engine.async_scheduling={mode}"]
    program = FORKING + body.format(folder=str(folder), words=words)
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
                           timeout=TIMEOUT_S)  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
