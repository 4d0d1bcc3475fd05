"""Threads of ours allocate where the main thread does, where the C library can be told so and nobody said otherwise."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from framework.worker.arena import share_main_arena

ALLOCATES = """
import torch
from framework.worker.task_thread import TaskThread
from framework_backends.cpu_memory import keep_freed_memory

keep_freed_memory()
piece = TaskThread("test").submit(torch.empty, 100 << 20).result()
(heap,) = [line.split()[0] for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
start, end = (int(place, 16) for place in heap.split("-"))
print(start <= piece.data_ptr() < end)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such arenas")
@pytest.mark.parametrize(("said", "shares"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_a_thread_s_large_pieces_lie_in_the_main_thread_s_heap(said, shares):
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}, **said}
    done = subprocess.run([sys.executable, "-c", ALLOCATES], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(shares), done.stderr


@pytest.fixture
def asked(monkeypatch):
    """What glibc would be told."""
    told = []
    library = SimpleNamespace(mallopt=lambda name, value: told.append((name.value, value.value)) or 1)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return told


def test_one_arena_is_asked_of_glibc(asked):
    assert share_main_arena.__wrapped__() and asked == [(-8, 1)]


@pytest.mark.parametrize(
    ("name", "value", "shares"),
    [
        ("MALLOC_ARENA_MAX", "2", False),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.arena_max=3", False),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0", True),
    ],
)
def test_what_the_environment_says_stands(asked, monkeypatch, name, value, shares):
    monkeypatch.setenv(name, value)
    assert share_main_arena.__wrapped__() is shares and bool(asked) is shares


@pytest.mark.parametrize("library", [SimpleNamespace(), None])
def test_other_libraries_are_left_alone(asked, monkeypatch, library):
    def load(name):
        if library is None:
            raise TypeError("no library of no name")
        return library

    monkeypatch.setattr("ctypes.CDLL", load)
    assert not share_main_arena.__wrapped__()
