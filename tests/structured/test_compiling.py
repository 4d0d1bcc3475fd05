"""Compilations: shared while under way, kept by use, tried anew after a failure."""

import threading

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
