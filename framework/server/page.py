"""The page at `/`: one document of its own parts, which asks nobody but this server for anything.

The parts lie in the folder `page`; they are put together once, when the server starts. What the page shows comes from
`about`, `live` and the routes that every client uses.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

if TYPE_CHECKING:
    from framework.server.service import Service

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("dom", "stream", "form", "tokens", "playground", "charts", "live", "tables", "main")
"""Parts of the script in the order in which they are read: each knows the ones before it."""


@cache
def document() -> tuple[str, str]:
    """The page, and the content security policy that lets its own style and script run and nothing else."""
    style = _part("style.css")
    script = '"use strict";\n' + "\n".join(_part(f"{name}.js") for name in SCRIPTS)
    page = _part("index.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    return page, policy(style, script)


def policy(style: str, script: str) -> str:
    rules = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    page, rules = document()
    headers = {
        "Content-Security-Policy": rules,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @router.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return router
