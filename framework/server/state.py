"""`GET /health` and `/version`: whether the server takes requests, and what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from framework import API_VERSION, __version__
from framework.server.errors import ApiError
from framework.server.service import DRAIN_RETRY_S, SHUT_DOWN

if TYPE_CHECKING:
    from framework.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="200 while requests are taken, 503 while the server drains")
    async def health() -> dict[str, Any]:
        if service.load.is_draining:
            raise ApiError(503, SHUT_DOWN, code="shutting_down", retry_after_s=DRAIN_RETRY_S)
        if not service.llm.is_usable:
            raise ApiError(503, "the engine stopped when a step failed; start the server anew", code="engine_error")
        return {"status": "ok"}

    @router.get("/version", summary="Versions of the server and of its plugin API")
    async def version() -> dict[str, Any]:
        return {"version": __version__, "plugin_api": ".".join(map(str, API_VERSION))}

    return router
