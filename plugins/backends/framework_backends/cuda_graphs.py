"""Steps as CUDA graphs: recorded once, replayed with one call, all in one pool of memory.

A graph reads and writes the addresses that it was recorded with. Graphs run one behind the other, so that they may
share the memory of what none of them returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from framework.errors import ConfigError, FrameworkError, first_line
from framework_backends.cuda_transfers import HostCopies, TransferStream


class Captured:
    """A step that is replayed. Its value holds the same tensors each time; `copies` takes them to the host."""

    __slots__ = ("_graph", "_transfers", "_value", "copies")

    def __init__(self, graph: torch.cuda.CUDAGraph, value: Any, transfers: TransferStream) -> None:
        self._graph, self._value, self._transfers = graph, value, transfers
        self.copies: HostCopies = transfers.copies(value)

    def __call__(self) -> Any:
        self._transfers.before_overwrite()
        self._graph.replay()
        return self._value


class Graphs:
    """Records steps on a stream of its own."""

    def __init__(self, device: torch.device, transfers: TransferStream) -> None:
        self._device, self._transfers = device, transfers
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Any], what: str) -> Captured:
        """Runs the step once, which compiles its kernels, and records it. Waits for the device.

        Raises ConfigError for a step that cannot be recorded; errors of our own kinds pass as they are.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
            torch.cuda.synchronize(self._device)
            try:
                graph, value = self._record(step)
            except FrameworkError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"backend=cuda: {what} cannot be captured as a graph ({first_line(error)}). A stage or an "
                    "attention plugin that declares it can is wrong; engine.graphs=off runs without graphs"
                ) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Captured(graph, value, self._transfers)

    def _record(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            value = step()
        finally:
            graph.capture_end()
        return graph, value
