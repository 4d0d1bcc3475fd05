"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}`, whatever has gone wrong.

Routes raise `ApiError`, or let errors of the engine through; `install` makes answers of both, and of what FastAPI and
Starlette refuse by themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from framework.errors import FrameworkError, NotBuiltError, RequestError, class_and_text, in_one_line
from framework.request import SamplingParams

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("framework")
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FIELDS = {"prompt", "messages", "tools", "tool_choice", "priority", "cache_salt", *SamplingParams.defaults()} - {"n"}


class ApiError(Exception):
    """An answer that is an error. param: the field that it is about. code: a word for programs to look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}

    def body(self) -> dict[str, Any]:
        """What is sent, as a whole answer or as an event of a stream."""
        return error_body(self.status, in_one_line(str(self)), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error with this HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(error: Exception) -> ApiError:
    """The answer to a request that a check refused with a ValueError or TypeError: 400, with the field it names."""
    message = str(error)
    message = message.replace("SamplingParams.", "").replace("prompt_token_ids", "prompt")
    param = "n" if message.startswith("n ") else next((w for w in re.findall(r"\w+", message) if w in _FIELDS), None)
    code = "not_supported" if isinstance(error, NotBuiltError) else "invalid_value"
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to whatever a request ended with: the caller's fault where an error says so, else ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | NotBuiltError):
        return refused(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than server.request_timeout allows", code="timeout")
    if isinstance(error, FrameworkError | RuntimeError):
        return ApiError(500, str(error), code="engine_error")
    _log.error("the server failed", exc_info=error)
    return _failure(error)


def _failure(error: BaseException) -> ApiError:
    return ApiError(500, f"the server failed: {class_and_text(error)}", code="server_failure")


@contextmanager
def refusing() -> Iterator[None]:
    """Makes 400 of what checks of a caller's values raise inside. For checks alone: our own faults are not theirs."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise refused(error) from error


def answer_of(error: ApiError) -> Response:
    """The HTTP answer of an error."""
    from starlette.responses import JSONResponse

    return JSONResponse(error.body(), error.status, headers=error.headers)


class AnswersFaults:
    """An ASGI layer that answers what nobody below it has caught: a fault of ours. One amid an answer breaks it off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            _log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await answer_of(_failure(error))(scope, receive, send)


def install(app: FastAPI) -> None:
    """Lets the application answer every error in the one form."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer_of(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer_of(_invalid(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(error.status_code, _http_text(request, error), code=_http_code(error.status_code))
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def on_refused(request: Request, error: Exception) -> Response:
        return answer_of(refused(error))

    async def on_half_a_character(request: Request, error: Exception) -> Response:
        # What no UTF-8 can hold came from a client, by an escape such as \ud800: pydantic cannot even report it.
        return answer_of(ApiError(400, "the body holds half of a surrogate pair, which is no character"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(UnicodeEncodeError, on_half_a_character)
    app.add_exception_handler(RequestError, on_refused)
    app.add_exception_handler(NotBuiltError, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)


def _http_text(request: Request, error: Any) -> str:
    path = request.url.path
    if error.status_code == 404 and error.detail == "Not Found":
        return f"there is no {path} here; /docs lists what there is"
    if error.status_code == 405:
        return f"{request.method} is not a method of {path}; use {(error.headers or {}).get('Allow', 'another')}"
    if error.status_code == 400:
        return "the body cannot be read as JSON in UTF-8"
    return str(error.detail)


def _http_code(status: int) -> str | None:
    return {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(status)


def _invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first fault that pydantic found, in the words of the protocol."""
    first = errors[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    context = first.get("ctx") or {}
    param = context.get("param") or _path(place) or None
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type") and not place:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    message = text if "param" in context or param is None else f"{param}: {text}"
    return ApiError(
        400, message, param=param, code="unknown_field" if first["type"] == "unknown_field" else "invalid_value"
    )


def _path(place: Sequence[Any]) -> str:
    """`messages[0].content`: names up to the first that is none of a body, such as a branch of a union."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "list", "dict"):
            path += f".{part}" if path else part
        else:
            break
    return path
