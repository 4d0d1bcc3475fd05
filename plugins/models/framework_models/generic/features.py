"""Hidden states between the layers of a model of transformers, taken by hooks while a forward pass asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


class Features:
    """layers: modules of the stack, in their order."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    @contextmanager
    def kept(self, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """{i: [T, H] what enters layer i, or for the number of layers what leaves the last}, filled by a forward pass
        inside. Hooks are there for as long, so that other passes pay nothing."""
        found: dict[int, Tensor] = {}
        hooks = [self._hook(index, found) for index in wanted]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, index: int, found: dict[int, Tensor]) -> Any:
        if index == len(self._layers):
            return self._layers[-1].register_forward_hook(partial(_keep_output, found, index))
        return self._layers[index].register_forward_pre_hook(partial(_keep_input, found, index), with_kwargs=True)


def _keep_input(found: dict[int, Tensor], index: int, _: Any, given: tuple[Any, ...], words: dict[str, Any]) -> None:
    found[index] = (given[0] if given else words["hidden_states"])[0].clone()


def _keep_output(found: dict[int, Tensor], index: int, _: Any, __: Any, output: Any) -> None:
    found[index] = (output if isinstance(output, Tensor) else output[0])[0].clone()


def layers_around(model: nn.Module, inner: Sequence[nn.Module]) -> list[nn.Module] | None:
    """The elements of one ModuleList that hold one of `inner` each, in its order; None where there is no such list."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(inner):
            held = [any(part is one for part in layer.modules()) for layer, one in zip(module, inner, strict=True)]
            if all(held):
                return list(module)
    return None
