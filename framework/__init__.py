"""The public names of the engine, all lazy: importing `framework` imports no torch.

What each name means is in the module that defines it; this file only says where that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
API_VERSION: tuple[int, int] = (1, 0)
"""Version of the plugin contracts, (major, minor). Within a major, only optional things are added."""

if TYPE_CHECKING:
    from framework.engine.aio import AsyncLLM
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
    "AsyncLLM": "framework.engine.aio",
    "SamplingParams": "framework.request",
    "StructuredOutputsParams": "framework.request",
    "PoolingParams": "framework.request",
    "RequestOutput": "framework.request",
    "CompletionOutput": "framework.request",
    "Logprob": "framework.request",
}

__all__ = [
    "API_VERSION",
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The public name, imported at its first use; AttributeError for any other."""
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
