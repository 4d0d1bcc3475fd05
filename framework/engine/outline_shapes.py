"""Operations on tensors without memory that model constructors use, answered by shape alone.

Torch's own answer for the meta device imports its compiler with the first such operation, which takes seconds: more
than all else that is done before weights load. What is not known here is left to torch. `outline` works inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WITH_NUMBERS = frozenset({"add", "sub", "mul", "div", "__radd__", "__rsub__", "__rmul__"})


class ShapesAlone(TorchFunctionMode):
    """While it is entered, sums and products of a meta tensor with a number, and concatenations of meta tensors, are
    empty meta tensors of the right shape and dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name in _WITH_NUMBERS and not kwargs and _is_meta(args[0]) and isinstance(args[1], int | float):
            return args[0].new_empty(args[0].shape, dtype=_dtype_of(name, *args))
        if name in ("cat", "concat") and "out" not in kwargs and all(map(_is_meta, args[0])):
            return _concatenated(*args, **kwargs)
        return func(*args, **kwargs)


def _dtype_of(name: str, tensor: Tensor, number: float) -> torch.dtype:
    dtype = torch.result_type(tensor, number)
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return torch.get_default_dtype() if name == "div" and is_whole else dtype  # a division of integers gives fractions


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    same = [[size for at, size in enumerate(t.shape) if at != dim % first.ndim] for t in tensors]
    if any(one != same[0] for one in same) or len({t.dtype for t in tensors}) > 1:
        return torch.cat(list(tensors), dim)  # which says what is wrong, or which dtype comes of them
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return first.new_empty(shape)
