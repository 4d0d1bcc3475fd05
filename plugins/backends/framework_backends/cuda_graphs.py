"""Steps as CUDA graphs: recorded once, replayed with one call, all in one pool of memory.

A graph reads and writes the addresses that it was recorded with. Graphs run one behind the other, so that they may
share the memory of what none of them returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from framework.errors import ConfigError, FrameworkError, first_line
from framework_backends.cuda_device import WHOLE_DEVICE
from framework_backends.cuda_transfers import Arriving, Outbox, Slot, Transfers
from framework_backends.triton.compile_ahead import compile_ahead

_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs that could not be recorded: the allocator of pinned memory may ask them for good."""


class Captured:
    """A step that is replayed. Its value holds the same tensors each time.

    outbox  into which the step writes its value, None for one that is copied behind it
    """

    __slots__ = ("_copies", "_graph", "_outbox", "_slot", "_transfers", "_value")

    def __init__(self, graph: torch.cuda.CUDAGraph, value: Any, outbox: Outbox | None, transfers: Transfers) -> None:
        self._graph, self._value, self._outbox, self._transfers = graph, value, outbox, transfers
        self._slot: Slot | None = None
        self._copies = transfers.copies(value) if outbox is None else outbox.copies

    def __call__(self) -> Any:
        if self._outbox is None:
            self._graph.replay()
            return self._value
        try:
            self._graph.replay()
            self._slot = self._outbox.next()
        except BaseException:  # an interrupt, perhaps: whether the step runs, and takes a slot, is not known
            with suppress(Exception):  # of the device, which may be lost
                self._outbox.begin_anew()
            raise
        return self._value

    def arriving(self) -> Arriving | Slot:
        """The value of the last call, on its way to the host."""
        if self._slot is None:
            return self._transfers.started(self._copies)
        return self._transfers.written(self._slot)


class Pool:
    """Memory that recordings share. One that has failed leaves it to those before it, and the next ones get another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()

    def begin(self, graph: torch.cuda.CUDAGraph, mode: str) -> None:
        graph.capture_begin(pool=self._handle, capture_error_mode=mode)

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Raises RuntimeError for a recording that has failed."""
        try:
            graph.capture_end()
        except RuntimeError:
            end_failed(graph, self._device, self._handle)
            self._handle = torch.cuda.graph_pool_handle()
            raise


class Rehearsals:
    """Recordings that are never run, in a pool of memory of their own. graphs: they keep the pool, while they live."""

    def __init__(self, device: torch.device) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = Pool(device)

    def call_all(self, steps: Iterable[Callable[[], Any]]) -> None:
        """Calls steps so that they execute nothing. What they raise is dropped."""
        for step in steps:
            self._call(step)

    def _call(self, step: Callable[[], Any]) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # which is not made ready to run
        # relaxed: a kernel of a library may be loaded here for the first time.
        self._pool.begin(graph, "relaxed")
        try:
            with suppress(Exception):
                step()
        finally:
            with suppress(RuntimeError):
                self._pool.end(graph)
                self.graphs.append(graph)


class Graphs:
    """Records steps on a stream of its own."""

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self._device, self._transfers = device, transfers
        self._stream = torch.cuda.Stream(device)
        self._pool = Pool(device)

    def capture(self, step: Callable[[], Any], what: str) -> Captured:
        """Runs the step once, which compiles its kernels, and records it. Waits for the device.

        Raises ConfigError for a step that cannot be recorded; errors of our own kinds pass as they are.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with WHOLE_DEVICE, torch.cuda.stream(self._stream):
            try:
                outbox = self._transfers.outbox(step())
            finally:  # also what a step has launched that failed in the middle is not to meet the next one
                torch.cuda.synchronize(self._device)
            try:
                graph, value = self._record(step, outbox)
            except FrameworkError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"backend=cuda: {what} cannot be captured as a graph ({first_line(error)}). A stage or an "
                    "attention plugin that declares it can is wrong; engine.graphs=off runs without graphs"
                ) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Captured(graph, value, outbox, self._transfers)

    def compile_ahead(self, steps: Iterable[Callable[[], Any]]) -> None:
        """Compiles side by side what the steps launch, and runs none of them: they are recorded for nobody.

        A step that cannot be recorded is left out, and compiles its kernels where it runs; its error, if it is one, is
        told there.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with WHOLE_DEVICE, torch.cuda.stream(self._stream):
            rehearsals = Rehearsals(self._device)
            compile_ahead(lambda: rehearsals.call_all(steps))
            rehearsals.graphs.clear()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _record(self, step: Callable[[], Any], outbox: Outbox | None) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        self._pool.begin(graph, "thread_local")
        try:
            value = step()
            if outbox is not None:
                outbox.write(value)
        except BaseException:
            with suppress(RuntimeError):  # which says less than the step's own error
                self._pool.end(graph)
            raise
        self._pool.end(graph)
        return graph, value


def end_failed(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Ends for torch a recording that has failed: up to torch 2.12 its allocators believe that it goes on, ask the
    graph with each allocation, and refuse both another recording in its pool and `empty_cache`; and its generator draws
    no number any more, since what it counts seems to belong to the graph."""
    _FAILED.append(graph)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # it is ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
