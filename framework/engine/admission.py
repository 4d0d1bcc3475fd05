"""From what a caller passed to a `Request`: every check that needs the model or the tokenizer happens here.

Nothing has run when a check fails, and the error names the prompt's index, the field, the value and the way out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.errors import NotBuiltError, RequestError, did_you_mean, shown
from framework.request import PoolingParams, Request, SamplingParams, as_integer, plain
from framework.rng import MASK64, child_seed
from framework.structured.grammars import NoGrammars

if TYPE_CHECKING:
    from framework.sampling.pipeline import SamplerPipeline
    from framework.structured.grammars import Grammars
    from framework.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "priority", "lora")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the caller gave it, with its keys checked and its text turned into ids."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class Limits:
    """What the model and the configuration allow. eos_token_ids: ids that end a request unless `ignore_eos`."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    policy: str
    engine_seed: int | None


class Admission:
    """Makes `Request`s. `defaults` stand where the caller passes no parameters at all."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer | None,
        pipeline: SamplerPipeline,
        defaults: SamplingParams,
        grammars: Grammars | NoGrammars | None = None,
    ) -> None:
        self.limits, self.tokenizer, self.defaults = limits, tokenizer, defaults
        self._pipeline = pipeline
        self.grammars = grammars or NoGrammars("this engine has no grammar")
        self._num_arrived = 0

    def request(self, request_id: str, prompt: Any, params: SamplingParams | None) -> Request:
        """A checked request. Raises RequestError, NotBuiltError or TypeError."""
        return self._make(request_id, self.prompt(prompt), self.params(params), self._num_arrived)

    def count_arrival(self) -> None:
        """The request made with the next arrival index has been queued: a refused one leaves its index, and the seed
        that follows from it, to the next."""
        self._num_arrived += 1

    def requests(
        self, request_ids: Sequence[str], prompts: Sequence[Any], params: Sequence[SamplingParams | None]
    ) -> list[Request]:
        """All of them or none: an error names the index of the prompt it is about."""
        made = []
        for index, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                made.append((self.prompt(prompt), self.params(p)))
                self._check_length(*made[-1])
            except (ValueError, TypeError) as e:
                raise type(e)(f"{label(prompt, index)}: {e}") from None
        numbered = enumerate(zip(request_ids, made, strict=True), start=self._num_arrived)
        return [self._make(request_id, *pair, index) for index, (request_id, pair) in numbered]

    # ------------------------------------------------------------------------------------------------- prompts

    def prompt(self, prompt: Any) -> Prompt:
        """`prompt` in any of its public forms: str, list or array of ids, a dict with `prompt` or `prompt_token_ids`.

        A `Prompt` is one whose text has been turned into ids already, as `chat` does without adding special tokens.
        """
        if isinstance(prompt, Prompt):
            self._check_vocabulary(prompt.token_ids)
            return prompt
        prompt = plain(prompt)
        keys = self._keys(prompt) if isinstance(prompt, Mapping) else {}
        given = [k for k in ("prompt", "prompt_token_ids") if k in keys]
        if isinstance(prompt, Mapping):
            if len(given) != 1:
                raise RequestError(
                    f"a prompt dict needs exactly one of prompt, prompt_token_ids; got {given or 'none'}"
                )
            prompt = plain(keys[given[0]])
            wanted = str if given[0] == "prompt" else Sequence
            if not isinstance(prompt, wanted) or (wanted is Sequence and isinstance(prompt, str)):
                raise TypeError(
                    f"{given[0]} must be {'a string' if wanted is str else 'a list of ids'}, got {shown(prompt)}"
                )
        text = prompt if isinstance(prompt, str) else None
        if text == "":  # whatever special tokens the tokenizer would add to it
            raise RequestError("the prompt is empty; give at least one character")
        ids = self._encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return Prompt(ids, text, self._salt(keys.get("cache_salt")), self._priority(keys.get("priority", 0)))

    def _keys(self, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in prompt:
            if key not in _PROMPT_KEYS:
                hint = did_you_mean(str(key), _PROMPT_KEYS) or f" Known: {', '.join(_PROMPT_KEYS)}"
                raise RequestError(f"a prompt dict has no key {shown(key)}.{hint}")
        for key in ("prompt_embeds", "lora"):
            if prompt.get(key) is not None:
                raise NotBuiltError(f"{key} is not built yet; leave it out of the prompt")
        return prompt

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer, so a text prompt cannot be read; pass prompt_token_ids")
        ids = self.tokenizer.encode(text)
        self._check_vocabulary(ids)
        return ids

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        """Refuses a text that another model's tokenizer has turned into ids."""
        if ids and max(ids) >= self.limits.vocab_size:
            raise RequestError(
                f"the tokenizer gives id {max(ids)}, outside the model's vocabulary 0..{self.limits.vocab_size - 1}. "
                "Use the model's own tokenizer: leave model.tokenizer out, or name another"
            )

    def _check_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, bytes) or not isinstance(ids, Sequence):
            way_out = "; decode it, as in .decode('utf-8')" if isinstance(ids, bytes) else ""
            raise TypeError(
                f"a prompt must be a string, a list of token ids or a dict, got {type(ids).__name__}{way_out}"
            )
        ids, vocab = list(ids), self.limits.vocab_size
        if ids and isinstance(plain(ids[0]), str | list | tuple | Mapping):
            raise TypeError(
                f"a prompt must be a string or a list of token ids, got a list that begins with {shown(ids[0])}; "
                "give each prompt by itself"
            )
        for place, i in enumerate(ids):
            if type(i) is not int:
                ids[place] = i = as_integer(f"prompt_token_ids[{place}]", i)
            if not 0 <= i < vocab:
                raise RequestError(f"prompt_token_ids[{place}] is {shown(i)}, outside the vocabulary 0..{vocab - 1}")
        return ids

    @staticmethod
    def _salt(salt: Any) -> str | None:
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt must be a non-empty string, got {shown(salt)}")
        return salt

    def _priority(self, given: Any) -> int:
        priority = as_integer("priority", given)
        if priority and self.limits.policy != "priority":
            raise RequestError(
                f"priority={shown(priority)} needs policy=priority, but policy={self.limits.policy}; "
                "leave priority out or start the engine with policy=priority"
            )
        return priority

    # ---------------------------------------------------------------------------------------------- parameters

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """The caller's parameters, checked against model, tokenizer and pipeline; the defaults for None."""
        if params is None:
            return self.defaults
        if isinstance(params, PoolingParams):
            raise NotBuiltError("PoolingParams: pooling is not built yet; pass SamplingParams")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        self.check(params)
        return params

    def uses_stage(self, key: str, params: SamplingParams) -> bool:
        """Whether the sampler stage runs for a request with these parameters."""
        return self._pipeline.uses(key, params)

    def check(self, params: SamplingParams) -> None:
        """Raises for what cannot be served here."""
        vocab = self.limits.vocab_size
        for name in ("stop_token_ids", "logprob_token_ids"):
            for i in getattr(params, name) or ():
                if i >= vocab:
                    raise RequestError(f"{name} holds {shown(i)}, outside the vocabulary 0..{vocab - 1}")
        if self.tokenizer is None and params.stop:
            raise RequestError(
                f"stop={list(params.stop)} needs text, and the model has no tokenizer; use stop_token_ids"
            )
        if self.tokenizer is None and params.detokenize and "detokenize" in params.named:
            raise RequestError("detokenize=True needs a tokenizer, and the model has none; use detokenize=False")
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(params, name)
            if k is not None and k > vocab:
                raise RequestError(f"{name}={shown(k)} is more than the vocabulary of {vocab} tokens")
        self._pipeline.validate(params)
        self.grammars.check(params)

    # ------------------------------------------------------------------------------------------------ requests

    def _check_length(self, prompt: Prompt, params: SamplingParams) -> int:
        """Most tokens of prompt and output together."""
        n, limit = len(prompt.token_ids), self.limits.max_model_len
        if n >= limit:
            raise RequestError(
                f"the prompt has {n} tokens but engine.max_model_len is {limit}, and one must be left to generate. "
                "Shorten the prompt or raise engine.max_model_len"
            )
        return limit if params.max_tokens is None else min(limit, n + params.max_tokens)

    def _make(self, request_id: str, prompt: Prompt, params: SamplingParams, index: int) -> Request:
        total = self._check_length(prompt, params)
        eos_token_ids = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=self._seed(params.seed, index),
            max_total_tokens=total,
            arrival_time=time.time(),
            arrival_index=index,
            priority=prompt.priority,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            cache_salt=prompt.cache_salt,
            prompt=prompt.text,
            constraint=self.grammars.constraint(params, eos_token_ids, prompt.token_ids),
        )

    def _seed(self, seed: int | None, index: int) -> int:
        """The request's seed, or one of its own: of engine.seed and its arrival, else of the system."""
        if seed is not None:
            return seed & MASK64
        if self.limits.engine_seed is not None:
            # +1: child 0 would be engine.seed itself, the seed of everybody who passes that number.
            return child_seed(self.limits.engine_seed & MASK64, index + 1)
        return int.from_bytes(os.urandom(8), "little")


def label(prompt: Any, index: int) -> str:
    """`prompt 3`, as errors call it; `conversation 3` for what `chat_prompt` has made."""
    return f"{'conversation' if isinstance(prompt, Prompt) else 'prompt'} {index}"


def chat_prompt(tokenizer: Tokenizer | None, messages: Any, **options: Any) -> Prompt:
    """A conversation as a prompt: `chat_text`, whose special tokens are the only ones it gets."""
    text = chat_text(tokenizer, messages, **options)
    assert tokenizer is not None, "refused with the messages"
    return Prompt(tokenizer.encode(text, add_special_tokens=False), text)


def chat_text(tokenizer: Tokenizer | None, messages: Any, **options: Any) -> str:
    """A conversation as the chat template renders it.

    options  of `Tokenizer.apply_chat_template`
    Raises RequestError, TypeError for messages of other types, NotBuiltError for content that is not text.
    """
    if tokenizer is None:
        raise RequestError("messages need a chat template, and the model has no tokenizer; use prompt_token_ids")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with role and content, got {shown(messages)}")
    if not messages:
        raise RequestError("the list of messages is empty; give at least one message")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    return tokenizer.apply_chat_template(messages, **options)


def _check_message(name: str, message: Any) -> None:
    """Role and content are texts; other keys are for the template to read."""
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a dict with role and content, got {shown(message)}")
    for key in ("role", "content"):
        if key not in message:
            raise RequestError(f"{name} has no {key}; write {{'role': 'user', 'content': 'text'}}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise TypeError(f"{name}: role must be a string, got {shown(role)}")
    if content is None or isinstance(content, list | tuple):
        what = "content=None" if content is None else "content as a list of parts"
        raise NotBuiltError(f"{name}: {what} is not built yet; write the content as one string")
    if not isinstance(content, str):
        raise TypeError(f"{name}: content must be a string, got {shown(content)}")
