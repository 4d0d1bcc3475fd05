"""A backend as its contract suite sees it: how it is built. The checks are in `backends` and `backend_experts`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from framework.interfaces import Backend, BackendContext


@dataclass(frozen=True)
class BackendCase:
    """The backend is built as target(options, BackendContext)."""

    target: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def build(self, **words: Any) -> Backend:
        backend: Backend = self.target(self.options, BackendContext(**{"dtype": "float32", **words}))
        return backend
