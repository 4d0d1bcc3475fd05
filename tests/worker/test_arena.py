"""Threads of ours allocate where the main thread does, where the C library can be told so and nobody said otherwise."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from framework.worker.arena import share_main_arena

ALLOCATES = """
import ctypes
import torch
from framework.worker.task_thread import TaskThread

piece = TaskThread("test").submit(torch.empty, 1 << 14).result()
size_and_flags = ctypes.c_size_t.from_address(piece.data_ptr() - ctypes.sizeof(ctypes.c_size_t)).value
NOT_IN_THE_MAIN_ARENA = 4
print(not size_and_flags & NOT_IN_THE_MAIN_ARENA)
"""
GLIBC = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
"""What changes what an allocator does."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such arenas")
@pytest.mark.parametrize(("said", "shares"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_a_thread_s_pieces_lie_in_the_main_thread_s_arena(said, shares):
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith(GLIBC)}, **said}
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
