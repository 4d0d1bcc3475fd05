"""Recording of steps: one that cannot be recorded is an error of its own, and of no other step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.interfaces import Bucket
from framework_backends import cuda_graphs
from framework_backends.cuda import CudaBackend
from framework_backends.cuda_graphs import Captured, Graphs
from framework_backends.cuda_transfers import Outbox, Transfers


class Recordings:
    """torch's recording, where a step that calls `wait` cannot be recorded.

    pools: the one of each recording; open_pools: those of which the allocator believes that a recording goes on;
    is_drawing: whether the generator counts for a graph
    """

    def __init__(self) -> None:
        self.is_drawing = False
        self.pools: list[int] = []
        self.open_pools: list[int] = []
        self.is_on = self.is_invalid = False

    def wait(self) -> None:
        if self.is_on:
            self.is_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert pool not in self.open_pools, "already recording to mempool_id"
        self.is_on, self.is_invalid, self.is_drawing = True, False, True
        self.pools.append(pool)
        self.open_pools.append(pool)

    def capture_end(self) -> None:
        self.is_on = False
        if self.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.open_pools.remove(self.pools[-1])
        self.is_drawing = False

    def clone_state(self) -> bool:
        return False

    def graphsafe_set_state(self, is_drawing: bool) -> None:
        self.is_drawing = is_drawing


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    made, pools = Recordings(), iter(range(100))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph=False: made)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.wait)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: made.open_pools.remove(pool))
    monkeypatch.setattr(torch.cuda, "default_generators", {None: made})
    monkeypatch.setattr(cuda_graphs, "_FAILED", [])
    return made


def refused(graphs: Graphs, step: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"a step of 3 rows cannot be .* \(.*operation not permitted.*graphs=off"):
        graphs.capture(step, "a step of 3 rows")


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_step_behind_one_that_was_interrupted_reads_its_own_value(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(sources: Sequence[Tensor], places: Sequence[int], ring: Tensor, turn: Tensor) -> None:
        ring[int(turn), : len(sources[0])] = sources[0]
        turn.copy_((turn + 1) % len(ring))

    device, value = torch.device("cpu"), torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "framework_backends.triton.outbox", SimpleNamespace(write_outbox=write))
    with torch.inference_mode():
        outbox, interrupts = Outbox(value, device), False
        outbox.write(value)
        outbox.begin_anew()

    def replay() -> None:
        if has_begun or not interrupts:
            with torch.inference_mode():
                write(outbox.copies.sources, outbox.copies.places, outbox._ring, outbox._turn)
        if interrupts:
            raise KeyboardInterrupt

    graph: Any = SimpleNamespace(replay=replay)
    captured = Captured(graph, value, outbox, Transfers(device))
    for number, interrupts in enumerate((False, False, True, False, False, False, False, False)):
        value.fill_(number)
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            captured()
            assert captured._slot is not None and captured._slot.value.tolist() == [number] * 16


def test_recordings_behind_one_that_failed_have_a_pool_of_their_own(recordings: Recordings) -> None:
    device = torch.device("cpu")
    graphs = Graphs(device, Transfers(device))
    graphs.capture(lambda: None, "a step of 1 rows")
    refused(graphs, recordings.wait)
    assert not recordings.is_drawing
    graphs.capture(lambda: None, "a step of 3 rows")
    graphs.capture(lambda: None, "a step of 2 rows")
    assert recordings.pools == [0, 0, 1, 1] and not recordings.open_pools


def test_recordings_of_several_threads_take_turns(recordings: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them waits for the device at its beginning, which is an error while one goes on."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: recordings.wait())
    device = torch.device("cpu")

    def record(_: int) -> None:
        Graphs(device, Transfers(device)).capture(lambda: sleep(0.005), "a step of 1 rows")

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(record, range(3)))
    assert len(recordings.pools) == 3 and not recordings.open_pools


def test_steps_are_rehearsed_one_by_one_and_one_that_fails_harms_nobody(recordings: Recordings) -> None:
    device = torch.device("cpu")
    graphs = Graphs(device, Transfers(device))
    was_on: list[bool] = []

    def step() -> None:
        was_on.append(recordings.is_on)

    def fails() -> None:
        step()
        raise ValueError("for the real run to tell")

    graphs.compile_ahead(iter([step, fails, recordings.wait, step]))
    graphs.capture(lambda: None, "a step of 1 rows")
    assert was_on == [True, True, True]
    assert recordings.pools == [1, 1, 1, 2, 0] and not recordings.open_pools and not recordings.is_on


@pytest.mark.parametrize("rows", [(1, 2, 4, 8, 16, 24, 32, 40, 64, 72, 128, 200, 256), (1, 2, 3), (40,), ()])
def test_buckets_that_tell_all_kernels_are_the_last_below_each_border(rows: tuple[int, ...]) -> None:
    told = CudaBackend.telling(SimpleNamespace(), [Bucket(n, n, n, 1) for n in reversed(rows)])  # type: ignore[arg-type]
    wanted = {max((n for n in rows if n <= border), default=None) for border in (1, 2, 4, 16, 31, 32, 64, 128, 512)}
    assert {bucket.requests for bucket in told} == wanted - {None}
    assert len(told) <= 9


def test_steps_with_prompts_grow_by_64_tokens_and_by_an_eighth_at_most() -> None:
    backend = SimpleNamespace(_captures=True)
    buckets = [one for one in CudaBackend.buckets(backend, 256, 8192) if one.query_len > 1]  # type: ignore[arg-type]
    tokens = [one.tokens for one in buckets]
    assert tokens[:16] == list(range(64, 1025, 64)) and tokens[-1] == 8192 and len(tokens) == 40
    assert all(y - x <= max(64, x / 8) for x, y in itertools.pairwise(tokens))
    assert {(one.requests, one.logits_rows) for one in buckets} == {(256, n) for n in (64, 128, 192, 256)}
    few = [one.tokens for one in CudaBackend.buckets(backend, 4, 100) if one.query_len > 1]  # type: ignore[arg-type]
    assert few == [64, 100]
    assert CudaBackend.buckets(backend, 4, 1) == [Bucket(1, 1, 1, 1)]  # type: ignore[arg-type]


@pytest.mark.cuda
def test_what_is_rehearsed_does_not_run() -> None:
    device = torch.device("cuda", 0)
    graphs, x = Graphs(device, Transfers(device)), torch.ones(4, device=device)
    graphs.compile_ahead([lambda: x.add_(1), lambda: x.add_(float(x.sum()))])
    captured = graphs.capture(lambda: x * 2, "a step of 4 rows")
    captured()
    assert captured.arriving().wait().tolist() == [2, 2, 2, 2]


@pytest.mark.cuda
def test_a_step_that_waits_is_refused_and_others_are_recorded_behind_it() -> None:
    device = torch.device("cuda", 0)
    graphs, x = Graphs(device, Transfers(device)), torch.ones(4, device=device)
    refused(graphs, lambda: x + float(x.sum()))
    captured = graphs.capture(lambda: x + 1, "a step of 4 rows")
    torch.cuda.empty_cache()
    torch.randn(4, device=device)
    x.fill_(5)
    captured()
    assert captured.arriving().wait().tolist() == [6, 6, 6, 6]
