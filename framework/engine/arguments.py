"""What a caller of `LLM` and `AsyncLLM` passes, checked and brought into one form. No engine is known here.

Whatever needs the model or the tokenizer is checked at admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from framework.config import Config, compose
from framework.errors import NotBuiltError, RequestError, shown
from framework.request import OutputKind, PoolingParams, SamplingParams, plain


def resolve_config(model: str | None, overrides: Sequence[str], config: Config | None) -> Config:
    """The arguments of `LLM` and `AsyncLLM` as one Config. Raises ConfigError, ValueError or TypeError."""
    if config is not None and (overrides or model is not None):
        raise ValueError("pass config alone, or model and overrides; a config already says both")
    words = check_words(overrides)
    if not isinstance(config, Config | None):
        raise TypeError(f"config must be a framework.config.Config, got {shown(config)}; words go into overrides")
    if config is None:
        config = compose(words)
    if model is not None:
        path, twice = _path_word(model), model_path_word(words)
        if twice is not None:
            raise ValueError(
                f"model={shown(path)} and overrides with {shown(twice)} both name the model; leave out one"
            )
        config = replace(config, model=replace(config.model, path=path))
    return config


def model_path_word(words: Iterable[str]) -> str | None:
    """The word that sets `model.path`, None when none does."""
    return next((word for word in words if word.lstrip("+").startswith("model.path=")), None)


def check_words(overrides: Any) -> list[str]:
    """The words of `overrides`. Raises TypeError for what is no list of words."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise TypeError(f"overrides must be a list of words, got {shown(overrides)}")
    return list(overrides)


def streaming_params(params: Any, defaults: SamplingParams) -> Any:
    """Parameters of a caller who streams: cumulative outputs unless an output_kind is named. Others as they are, for
    admission to refuse; a configured output_kind counts as named."""
    params = defaults if params is None else params
    if not isinstance(params, SamplingParams) or "output_kind" in params.named:
        return params
    return params.replace(output_kind=OutputKind.CUMULATIVE)


def check_use_tqdm(given: Any) -> None:
    """Raises TypeError for what is not True, False or None."""
    if not isinstance(given, bool | None):
        raise TypeError(f"use_tqdm must be True, False or None, got {shown(given)}")


def _path_word(model: Any) -> str:
    if not isinstance(model, str) and not hasattr(model, "__fspath__"):
        raise TypeError(f"model must be a hub id or a path, got {shown(model)}")
    return str(model)


def prompt_list(prompts: Any) -> list[Any]:
    """A list of prompts; one str, dict, or list or array of ids is one prompt."""
    prompts = plain(prompts)
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    is_one = bool(prompts) and all(isinstance(plain(p), int) for p in prompts)
    return [list(prompts)] if is_one else list(prompts)


def conversation_list(messages: Any) -> list[Any]:
    """A list of conversations; a list of messages is one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages must be a list of dicts with role and content, or a list of lists, got {shown(messages)}"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def template_options(given: Any) -> Mapping[str, Any]:
    """`chat_template_kwargs`, without what `chat` has arguments of its own for."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"chat_template_kwargs must map names to values, got {shown(given)}")
    for name in ("messages", "add_generation_prompt"):
        if name in given:
            raise RequestError(f"chat_template_kwargs must not hold '{name}': pass it as chat({name}=...)")
    return given


def params_list(params: Any, count: int) -> list[SamplingParams | None]:
    """One entry a prompt."""
    if isinstance(params, PoolingParams):
        raise NotBuiltError("PoolingParams: pooling is not built yet; pass SamplingParams")
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts; pass one for all, or one for each")
    return list(params)
