"""Chat templates: messages to the text of a prompt, through jinja2 in a sandbox.

The language is that of Hugging Face's `chat_template`; tokens are not made here. Called by `framework.tokenizer`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from framework.errors import CheckpointError, RequestError


class ChatTemplate:
    """A compiled template. Raises CheckpointError at construction when it does not compile."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(
                f"chat template does not compile: {error}. Set model.tokenizer to another."
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Text of the prompt. Raises RequestError when the template refuses the messages, with its own words."""
        try:
            return self._template.render(messages=messages, **variables)
        # A template is foreign code: a missing key or a wrong type in a message surfaces as any of these.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}. Correct roles and content."
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; in a prompt its body is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 asks for a plain set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands: jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
