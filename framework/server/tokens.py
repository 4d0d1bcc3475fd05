"""`POST /tokenize` and `/detokenize`: text to token ids and back, with the served model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter

from framework.server.asking import check_model
from framework.server.errors import ApiError, refusing
from framework.server.messages import chat_text_of, ids_of_chat
from framework.server.protocol import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from framework.server.service import Service
    from framework.tokenizer import Tokenizer

_T = TypeVar("_T")


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    turn = asyncio.Lock()

    async def beside(function: Callable[[], _T]) -> _T:
        """What may take long goes beside the event loop, and one at a time: a long text takes a gigabyte meanwhile."""
        async with turn:
            with refusing():
                return await asyncio.get_running_loop().run_in_executor(None, function)

    @router.post("/tokenize", summary="Token ids of a text or of a conversation")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(service, body.model)
        tokenizer = _tokenizer(service)
        ids = await beside(lambda: _ids(service, tokenizer, body))
        limit = service.llm.admission.limits.max_model_len
        texts = await beside(lambda: [*map(tokenizer.decode_token, ids)]) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}

    @router.post("/detokenize", summary="Text of token ids")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(service, body.model)
        tokenizer, size = _tokenizer(service), service.llm.admission.limits.vocab_size
        for place, i in enumerate(body.tokens):
            if not 0 <= i < size:
                raise ApiError(400, f"tokens[{place}] is {i}, outside the vocabulary 0..{size - 1}", param="tokens")
        return {"prompt": await beside(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))}

    return router


def _ids(service: Service, tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None, "one of both is given"
    options = dict(body.chat_template_kwargs or {})
    text = chat_text_of(
        service, body.messages, tools=body.tools, generation=body.add_generation_prompt is not False, options=options
    )
    return ids_of_chat(service, text)


def _tokenizer(service: Service) -> Tokenizer:
    found = service.llm.admission.tokenizer
    if found is None:
        raise ApiError(400, "the model has no tokenizer; its prompts are token ids", code="not_supported")
    return found
