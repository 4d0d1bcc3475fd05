"""The async API. Its part is not built yet: the name is here so that code which imports it can be imported."""

from __future__ import annotations

from typing import Any

from framework.errors import NotBuiltError


class AsyncLLM:
    """Refused by name when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotBuiltError("framework.AsyncLLM is not built yet. Use framework.LLM, which runs in the calling thread.")
