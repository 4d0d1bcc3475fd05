"""The contract suite of backends: memory and step functions against their plain torch meaning. What layers ask for is
in `backend_layers`, mixtures of experts are in `backend_experts`.

Each function of `CHECKS` takes a `BackendCase` and raises AssertionError when a duty of `framework.interfaces.Backend`
is broken; whole steps are checked by the engine of `run=check stage/NAME`. Called by `run=check` and by tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from framework import step_ops
from framework.batch import StepOutput
from framework.interfaces import Backend, KVSpec
from framework.testing import backend_experts, backend_layers
from framework.testing.backend_case import BackendCase
from framework.testing.checking import assert_all

__all__ = ["CHECKS", "BackendCase", "check_backend"]

NUM_BLOCKS = 9
SHAPES = ((2, 3, -1, 4, 5), (-1, 4, 7))
"""KV layouts: blocks stand anywhere among the axes."""


def _kv(backend: Backend) -> tuple[list[Tensor], list[KVSpec], list[Tensor]]:
    """(memory of two layers with a value of its own in every place, their specs, views with the blocks in front)."""
    specs = [KVSpec(shape, backend.dtype, 4) for shape in SHAPES]
    kv = backend.allocate_kv(specs, NUM_BLOCKS)
    for tensor in kv:
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape).to(tensor.dtype))
    return kv, specs, [tensor.movedim(spec.shape.index(-1), 0) for tensor, spec in zip(kv, specs, strict=True)]


def check_it_says_what_it_is(case: BackendCase) -> None:
    backend = case.build()
    assert isinstance(backend, Backend), f"{case.name}: is no framework.interfaces.Backend"
    assert backend.dtype == torch.float32, f"{case.name}: computes in {backend.dtype} when float32 is asked for"
    assert backend.max_in_flight >= 1, f"{case.name}: max_in_flight is {backend.max_in_flight}"


def check_kv_memory_is_zero_and_of_the_layout_asked_for(case: BackendCase) -> None:
    backend = case.build()
    specs = [KVSpec(shape, backend.dtype, 4) for shape in SHAPES]
    for tensor, spec in zip(backend.allocate_kv(specs, NUM_BLOCKS), specs, strict=True):
        wanted = tuple(NUM_BLOCKS if size == -1 else size for size in spec.shape)
        assert tuple(tensor.shape) == wanted, f"{case.name}: allocates {tuple(tensor.shape)}, {wanted} is wanted"
        assert tensor.device == backend.device, f"{case.name}: allocates on {tensor.device}"
        assert bool((tensor == 0).all()), f"{case.name}: KV memory is not zero at first"


def check_blocks_go_out_and_come_back(case: BackendCase) -> None:
    """gather gives whole blocks on the host, in the order asked for; scatter puts them anywhere."""
    backend = case.build()
    kv, specs, views = _kv(backend)
    before = [view.clone() for view in views]
    data = backend.gather_blocks(kv, specs, [5, 2])
    for values, view in zip(data, before, strict=True):
        assert torch.equal(values, view[[5, 2]].cpu()), f"{case.name}: gather_blocks gives other blocks than asked for"
    backend.scatter_blocks(kv, specs, [1, 7], data)
    for view, old in zip(views, before, strict=True):
        old[[1, 7]] = old[[5, 2]]
        assert torch.equal(view, old), f"{case.name}: scatter_blocks writes elsewhere, or something else"


def check_copies_read_before_they_write(case: BackendCase) -> None:
    """Pairs of one call may form a chain: every source is what it was before the call."""
    backend = case.build()
    kv, specs, views = _kv(backend)
    before = [view.clone() for view in views]
    backend.copy_blocks(kv, specs, [(1, 2), (2, 3), (3, 1)])
    for view, old in zip(views, before, strict=True):
        wanted = old.clone()
        wanted[[2, 3, 1]] = old[[1, 2, 3]]
        assert torch.equal(view, wanted), f"{case.name}: copy_blocks reads what it has written"


def check_rows_and_spans_are_written(case: BackendCase) -> None:
    """`apply_rows` and `apply_spans` equal the reference in `framework.step_ops`."""
    backend = case.build()
    rows, values = torch.tensor([3, 0]), torch.arange(10, dtype=torch.int32).view(2, 5)
    starts, counts, flat = [2, 11], [3, 4], torch.arange(7, dtype=torch.int32)
    found, wanted = (torch.full((6, 5), -1, dtype=torch.int32) for _ in range(2))
    found = found.to(backend.device)
    backend.step_ops.apply_rows(found, rows.to(backend.device), values.to(backend.device))
    step_ops.apply_rows(wanted, rows, values)
    assert torch.equal(found.cpu(), wanted), f"{case.name}: apply_rows writes something else than the reference"
    backend.step_ops.apply_spans(found.view(-1), starts, counts, flat.to(backend.device))
    step_ops.apply_spans(wanted.view(-1), starts, counts, flat)
    assert torch.equal(found.cpu(), wanted), f"{case.name}: apply_spans writes something else than the reference"


def check_steps_are_submitted(case: BackendCase) -> None:
    """The future gives what `collect` makes of the step's value, and raises what the step raised."""
    backend = case.build()
    output = StepOutput(np.zeros((1, 1), np.int32), np.ones(1, np.int32))

    def fails() -> None:
        raise ZeroDivisionError("of the step")

    seen: list[Any] = []

    def collect(value: Any) -> StepOutput:
        seen.append(value)
        return output

    future = backend.submit(backend.compile(lambda x: x + 1, None), (41,), collect)
    assert future.result() is output and seen == [42], f"{case.name}: a step's value does not reach its output"
    assert future.done(), f"{case.name}: a step is not done after its result"
    try:
        backend.submit(backend.compile(fails, None), (), collect).result()
    except ZeroDivisionError:
        return
    raise AssertionError(f"{case.name}: result() does not raise what the step raised")


def check_memory_for_kv_is_counted(case: BackendCase) -> None:
    backend = case.build()
    few, many = (backend.kv_bytes_available(256, 1024, fraction) for fraction in (0.7, 0.9))  # others use memory too
    assert 0 < few <= many, f"{case.name}: {few} bytes for seven tenths of the memory, {many} for nine"


CHECKS = (
    check_it_says_what_it_is,
    check_kv_memory_is_zero_and_of_the_layout_asked_for,
    check_blocks_go_out_and_come_back,
    check_copies_read_before_they_write,
    *backend_layers.CHECKS,
    *backend_experts.CHECKS,
    check_rows_and_spans_are_written,
    check_steps_are_submitted,
    check_memory_for_kv_is_counted,
)


def check_backend(case: BackendCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
