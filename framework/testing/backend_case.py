"""A backend as its contract suite sees it: how it is built, and in which dtypes. The checks are in `backends`,
`backend_layers` and `backend_experts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from framework.errors import ConfigError
from framework.interfaces import Backend, BackendContext
from framework.plugins import Registry
from framework.testing.checking import Skipped


def backend_here(plugins: Registry, dtype: str = "float32") -> Backend:
    """The backend that `backend=auto` takes on this machine."""
    name = plugins.auto("backend").name
    target, options = plugins.load_target("backend", name), plugins.build_options("backend", name, {})
    backend: Backend = target(options, BackendContext(dtype))
    return backend


@dataclass(frozen=True)
class BackendCase:
    """The backend is built as target(options, BackendContext)."""

    target: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def build(self, **words: Any) -> Backend:
        """words: of the `BackendContext`; float32 unless they say otherwise."""
        backend: Backend = self.target(self.options, BackendContext(**{"dtype": "float32", **words}))
        return backend

    def of_any_dtype(self, **words: Any) -> list[Backend]:
        """One of float32, and one of each dtype of 16 bits that it serves."""
        return [self.build(**words), *self._of_16_bits(words)[0]]

    def of_16_bits(self, **words: Any) -> list[Backend]:
        """One of each dtype of 16 bits that it serves. Skipped where it serves none."""
        found, refusals = self._of_16_bits(words)
        if not found:
            raise Skipped(f"it serves no dtype of 16 bits: {'; '.join(refusals)}")
        return found

    def _of_16_bits(self, words: Mapping[str, Any]) -> tuple[list[Backend], list[str]]:
        """(backends, refusals): it may refuse a dtype, by a ConfigError that names it."""
        found, refusals = [], []
        for dtype in (torch.bfloat16, torch.float16):
            word = str(dtype).removeprefix("torch.")
            try:
                backend = self.build(dtype=word, **words)
            except ConfigError as error:
                assert word in str(error), f"{self.name}: refuses engine.dtype={word} without naming it: {error}"
                refusals.append(str(error))
                continue
            assert backend.dtype == dtype, f"{self.name}: computes in {backend.dtype} when {word} is asked for"
            found.append(backend)
        return found, refusals
