"""What the OpenAPI document says of answers: errors in the one form, and answers that are an object or a stream.

Routes write their JSON themselves, since a stream has no time for models; nothing is checked against this while the
server runs. Tests do, with what schemathesis asks for.
"""

from __future__ import annotations

from typing import Any

_TEXT, _NUMBER, _OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}


def _object(**properties: Any) -> dict[str, Any]:
    """A schema whose every property is there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null("string"), code=_or_null("string")))
_USAGE = _object(prompt_tokens=_NUMBER, completion_tokens=_NUMBER, total_tokens=_NUMBER)
_HEAD = {"id": _TEXT, "created": _NUMBER, "model": _TEXT}
_CHOICE = {"index": _NUMBER, "finish_reason": _TEXT, "logprobs": _or_null("object")}

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused: what is wrong, and where", "content": _json(_ERROR)},
    "5XX": {"description": "The server is too busy, is shutting down, or failed", "content": _json(_ERROR)},
}
"""Of every route."""


def _whole_or_stream(schema: Any) -> dict[int | str, dict[str, Any]]:
    content = {**_json(schema), "text/event-stream": {"schema": _object(data=_TEXT)}}
    return {200: {"description": "An object, or its parts as server-sent events with stream=true", "content": content}}


COMPLETION = _whole_or_stream(
    _object(**_HEAD, object={"const": "text_completion"}, choices=_list(_object(**_CHOICE, text=_TEXT)), usage=_USAGE)
)
CHAT = _whole_or_stream(
    _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list(_object(**_CHOICE, message=_object(role={"const": "assistant"}, content=_or_null("string")))),
        usage=_USAGE,
    )
)
RESPONSE = _whole_or_stream(
    _object(id=_TEXT, object={"const": "response"}, status=_TEXT, output=_list(_OBJECT), usage=_or_null("object"))
)
