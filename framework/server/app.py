"""The application: every module of routes, the layers around them, and errors in one form.

A module of routes is added by a line of `MODULES`. One that has `async def start(service)` is started before the first
request is taken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from framework import __version__
from framework.server import (
    about,
    chat,
    completions,
    documented,
    errors,
    live,
    metrics,
    models,
    page,
    responses,
    state,
    tokens,
    tracing,
)
from framework.server.head import HeadAsGet
from framework.server.keys import ApiKeys
from framework.server.limits import BodyLimit
from framework.server.metrics_http import CountRequests
from framework.server.request_ids import RequestIds

if TYPE_CHECKING:
    from framework.server.service import Service

MODULES = (
    models,
    completions,
    chat,
    responses,
    tokens,
    state,
    metrics,
    tracing,
    about,
    live,
    page,
)


def make_app(service: Service) -> FastAPI:
    """The application of one service. ConfigError for a file of keys that cannot be read."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for module in MODULES:
            if hasattr(module, "start"):
                await module.start(service)
        yield

    app = FastAPI(title="framework", version=__version__, lifespan=lifespan, responses=documented.ERRORS)
    errors.install(app)
    for module in MODULES:
        app.include_router(module.routes(service))
    _add_layers(app, service)
    return app


def _add_layers(app: FastAPI, service: Service) -> None:
    """The last one added is the outermost: browsers ask what is allowed without a key, and every answer has an id.

    None may change or hold back what an answer consists of: events go past all of them (`corked.Chunks`).
    """
    options = service.options
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    app.add_middleware(HeadAsGet)
    app.add_middleware(errors.AnswersFaults)  # FastAPI's own answer to them would be outside of the ids
    if keys := options.keys():
        app.add_middleware(ApiKeys, keys=keys)
    if options.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(CountRequests, counts=service.metrics.http)
    if options.otlp_endpoint is not None:
        app.add_middleware(tracing.TakeContext)
    app.add_middleware(RequestIds)  # which copies the scope: those that read the route in it are inside
