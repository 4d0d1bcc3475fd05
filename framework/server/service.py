"""What every route of the server has: the engine, what was configured, and what it is called. Made by `run=serve`.

A module of routes has `routes(service) -> APIRouter`; `app` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.aio import AsyncLLM


@dataclass(frozen=True)
class Service:
    """model_name: as clients ask for it. created: when the server was started, seconds since 1970."""

    llm: AsyncLLM
    config: Config
    model_name: str
    created: int
