"""The public names of the engine, all lazy: importing `framework` imports no torch.

What each name means is in the module that defines it; this file only says where that is. A name whose part is not
built yet is refused by name when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
API_VERSION: tuple[int, int] = (1, 0)
"""Version of the plugin contracts, (major, minor). Within a major, only optional things are added."""

if TYPE_CHECKING:
    from framework.engine.llm import LLM
    from framework.request import (
        CompletionOutput,
        Logprob,
        PoolingParams,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

_WHERE = {
    "LLM": "framework.engine.llm",
    "SamplingParams": "framework.request",
    "StructuredOutputsParams": "framework.request",
    "PoolingParams": "framework.request",
    "RequestOutput": "framework.request",
    "CompletionOutput": "framework.request",
    "Logprob": "framework.request",
}
_NOT_BUILT = ("AsyncLLM",)

__all__ = [
    "API_VERSION",
    "LLM",
    "CompletionOutput",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The public name, imported at its first use. NotBuiltError for a promised one, AttributeError for any other."""
    import importlib

    if name in _NOT_BUILT:
        from framework.errors import NotBuiltError

        raise NotBuiltError(f"framework.{name} is not built yet. Use framework.LLM, which runs in the calling thread.")
    if name not in _WHERE:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
