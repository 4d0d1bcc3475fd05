"""What `graph_safe` means, checked without a graph and without a device: a recorded step serves other rows.

A step is recorded as the torch operations that it calls, and the recording is run again over the same memory with
other values in it, as a captured graph is: what the host has decided while recording stays decided, and nothing may
wait for a value. Part of `framework.testing.stages.CHECKS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from framework.batch import Rows
from framework.testing.checking import Skipped
from framework.testing.stage_bench import StageBench, StageCase, beginning, filled, logits_of, make_rows, same

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense: "reads a value: .item(), float(), int(), or bool() of a tensor, as `if` asks for",
    aten.is_nonzero: "reads a value: bool() of a tensor, as `if` asks for",
    aten.nonzero: "asks where values are not zero",
    aten.masked_select: "selects by a boolean mask",
    aten.unique_consecutive: "asks for different values",
    aten._unique2: "asks for different values",
    aten.repeat_interleave: "repeats by counts that are on the device",
}
"""Operations after which the host cannot go on before the device has answered."""
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
READS = {Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.cpu: ".cpu()", Tensor.__array__: "numpy"}
"""Calls that bring a whole tensor to the host."""


class Waits(AssertionError):
    """What a step does that waits for the device."""


class _Watched(TorchFunctionMode):
    """Raises Waits for what is no operation of a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise Waits(f"brings a tensor to the host: {READS[func]}")
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """The operations that are called meanwhile. Raises Waits for one that waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (what := WAITS.get(func.overloadpacket)) and not _gives_its_size(func, kwargs):
            raise Waits(what)
        if func.overloadpacket in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise Waits("selects by a boolean mask")
        found = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, found))
        return found

    def replay(self, results: Any) -> Any:
        """Runs the operations again; what `results`, given while recording, are now."""
        now: dict[int, Tensor] = {}
        for func, args, kwargs, before in self._calls:
            found = func(*_mapped(args, now), **_mapped(kwargs, now))
            for old, new in zip(tree_flatten(before)[0], tree_flatten(found)[0], strict=True):
                if isinstance(old, Tensor):
                    now[id(old)] = new
        return _mapped(results, now)


# Not in the body of the class: there torch wraps it, and the first call imports the compiler, which takes seconds.
Recording.__torch_dispatch__ = Recording.call  # type: ignore[method-assign, assignment]


def _gives_its_size(func: Any, kwargs: Mapping[str, Any]) -> bool:
    return func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is not None


def _mapped(values: Any, now: Mapping[int, Tensor]) -> Any:
    return tree_map_only(Tensor, lambda tensor: now.get(id(tensor), tensor), values)


def check_captured_step_serves_other_rows(case: StageCase) -> None:
    """A step recorded for rows of nobody, run again with the values of others in its memory, gives what those get."""
    if "graph_safe" not in case.target.spec.caps.keeps:
        raise Skipped("the stage does not declare to keep 'graph_safe'")
    (bench, wanting, plain), (other, _, _) = filled(case), filled(case)
    rows = beginning([*wanting, *plain])
    logits = logits_of(len(rows.req_idx_np))
    memory, nobody = torch.zeros_like(logits), make_rows([0] * len(logits), positions=[3] * len(logits))
    results, recording = _recorded(bench, memory, nobody)
    memory.copy_(logits)
    for one in fields(nobody):
        if isinstance(place := getattr(nobody, one.name), Tensor):
            place.copy_(getattr(rows, one.name))
    found, expected = _tensors(recording.replay(results)), _tensors(_step(other, logits, rows))
    what = "a captured step does for other rows what it did for those that it was captured with"
    assert all(map(same, found, expected)), f"{case.name}: {what}"
    for declared in bench.spec.fields:
        left, right = (one.rows_of(declared.name, rows.req_idx) for one in (bench, other))
        assert same(left, right), f"{case.name}: {what}, in its commit: see field '{declared.name}'"


def _recorded(bench: StageBench, logits: Tensor, rows: Rows) -> tuple[Any, Recording]:
    try:
        with _Watched(), Recording() as recording:
            return _step(bench, logits, rows), recording
    except Waits as waits:
        raise AssertionError(f"{bench.spec.name}: a step waits for the device, as it {waits}") from None


def _step(bench: StageBench, logits: Tensor, rows: Rows) -> Any:
    """What the stage makes of the rows, each of which then takes a token."""
    result = bench.call(logits, rows)
    tokens = rows.position.unsqueeze(1) + 2
    bench.stage.commit(rows, tokens, torch.ones_like(rows.offset))
    return result


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]
