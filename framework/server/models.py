"""`GET /v1/models` and `/v1/models/{model}`: the one model that is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from framework.server.asking import check_model

if TYPE_CHECKING:
    from framework.config import Config
    from framework.server.options import ServerOptions
    from framework.server.service import Service


def model_name(config: Config, options: ServerOptions) -> str:
    """What clients call the model: server.model_name, else a hub id, a package, or the name of a folder or file."""
    path = config.model.path
    if options.model_name is not None:
        return options.model_name
    if path.startswith("package:"):
        return path.removeprefix("package:")
    return Path(path).resolve().name if Path(path).exists() else path


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "framework",
            "max_model_len": service.llm.admission.limits.max_model_len,
        }

    @router.get("/v1/models", summary="Models that are served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{model:path}", summary="One of the models")
    async def model(model: str) -> dict[str, Any]:
        check_model(service, model)
        return card()

    return router
