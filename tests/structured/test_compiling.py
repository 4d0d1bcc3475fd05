"""Compilations: shared while under way, kept by use, tried anew after a failure."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from framework.interfaces import GrammarSpec
from framework.structured.compiling import Compiler


def spec(text):
    return GrammarSpec("regex", text)


def test_compilation_under_way_is_shared():
    go, calls = threading.Event(), []

    def compile(asked):
        calls.append(asked)
        go.wait(60)
        return asked.text

    compiler = Compiler(compile, 4)
    first, second, other = compiler.ask(spec("a")), compiler.ask(spec("a")), compiler.ask(spec("b"))
    go.set()
    assert first is second and (first.result(), other.result()) == ("a", "b")
    assert sorted(s.text for s in calls) == ["a", "b"]
    compiler.close()


def test_those_used_last_are_kept():
    calls = []
    compiler = Compiler(lambda asked: calls.append(asked.text) or asked.text, 2)
    for text in "ababcab":
        compiler.ask(spec(text)).result()
    assert "".join(calls) == "abcab"  # c drops a, which drops b
    compiler.close()


def test_failed_compilation_is_tried_anew():
    calls = []

    def compile(asked):
        calls.append(asked)
        if len(calls) == 1:
            raise MemoryError
        return asked.text

    compiler = Compiler(compile, 2)
    assert isinstance(compiler.ask(spec("a")).exception(), MemoryError)
    assert compiler.ask(spec("a")).result() == "a"
    compiler.close()


def test_constraint_that_takes_long_does_not_hold_up_one_that_is_quick():
    go = threading.Event()
    compiler = Compiler(lambda asked: go.wait(60) if asked.text == "long" else asked.text, 4)
    long = compiler.ask(spec("long"))
    assert compiler.ask(spec("quick")).result(60) == "quick" and not long.done()
    go.set()
    compiler.close()


def test_close_cancels_what_has_not_begun_and_waits_for_nothing():
    go, begun = threading.Event(), threading.Barrier(3)

    def compile(asked):
        begun.wait(60)
        go.wait(60)

    compiler = Compiler(compile, 4)
    futures = [compiler.ask(spec(text)) for text in "abc"]
    begun.wait(60)
    compiler.close()
    with pytest.raises(CancelledError):
        futures[2].result(60)
    go.set()
    assert [future.result(60) for future in futures[:2]] == [None, None]


def test_threads_end_with_a_compiler_that_nobody_closed():
    before = set(threading.enumerate())
    compiler = Compiler(lambda asked: asked.text, 4)
    assert [compiler.ask(spec(text)).result(60) for text in "ab"] == ["a", "b"]
    threads = set(threading.enumerate()) - before
    del compiler
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)


def test_compilation_that_hangs_does_not_keep_the_process_from_ending():
    program = """
import threading
from framework.interfaces import GrammarSpec
from framework.structured import compiling
compiling.EXIT_WAIT_S = 0.1
begun = threading.Event()
compiler = compiling.Compiler(lambda asked: (begun.set(), threading.Event().wait(3600)), 4)
compiler.ask(GrammarSpec("regex", "a"))
begun.wait()
compiler.close()
print("closed")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout == "closed\n" and not ran.stderr


def test_compilation_under_way_ends_before_the_process():
    program = """
import threading, time
from framework.interfaces import GrammarSpec
from framework.structured import compiling
begun = threading.Event()
compiler = compiling.Compiler(lambda asked: (begun.set(), time.sleep(0.2), print("compiled", flush=True)), 4)
compiler.ask(GrammarSpec("regex", "a"))
begun.wait()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout == "compiled\n" and not ran.stderr
