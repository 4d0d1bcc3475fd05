"""`/about`: the resolved configuration, the plugin table and a description of every sampling parameter, as JSON.

The page draws its forms and tables from it. All of it is read from the dataclasses, the registry and the engine
itself, so that none of it has to be kept in step by hand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from framework import __version__
from framework.config import COMPONENT_GROUPS
from framework.engine.reasons import once_built
from framework.plugins import Registry, registry
from framework.request import SamplingParams
from framework.secret_words import NOT_SHOWN, is_secret, may_hold_secret

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.engine import Engine
    from framework.server.service import Service

SHAPES = {
    "stop": "strings",
    "stop_token_ids": "ids",
    "logprob_token_ids": "ids",
    "logit_bias": "json",
    "allowed_token_ids": "ids",
    "bad_words": "strings",
    "bad_words_token_ids": "json",
    "structured_outputs": "json",
    "output_kind": "text",
    "stages": "json",
    "extra_args": "json",
}
"""How the values of parameters are written whose type says nothing: one text a line, ids in a row, or JSON."""
GROUPS = {
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "seed", "n"),
    "Length and ending": (
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    ),
    "Penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "Tokens": ("logit_bias", "allowed_token_ids", "bad_words", "bad_words_token_ids"),
    "Logprobs": ("logprobs", "prompt_logprobs", "logprob_token_ids"),
    "Structure": ("structured_outputs",),
    "Stages": ("stages", "extra_args"),
}  # fmt: skip
"""Sections of a form, in their order; a parameter that stands in none of them is under `OTHER`."""
OTHER = "Other"
_LINE = re.compile(r"(\w+) {2,}(\S.*)")


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/about", summary="Configuration, plugins and parameters of this server")
    async def about() -> dict[str, Any]:
        return await describe(service)

    return router


async def describe(service: Service) -> dict[str, Any]:
    """Everything, ready for JSON."""
    engine = await service.llm.ask(_of_engine)
    plugins = registry()
    return {
        "name": service.model_name,
        "version": __version__,
        "created": service.created,
        **engine,
        "params": parameters(engine["defaults"]),
        "stages": stages(service.config, plugins),
        "settings": settings(service),
        "plugins": components(service.config, plugins, engine["facts"]),
        "left_out": [str(failure) for failure in plugins.failures],
    }


def _of_engine(engine: Engine) -> dict[str, Any]:
    """What was chosen and measured when it was built, and what a request gets that names nothing."""
    defaults = engine.admission.defaults
    return {
        "facts": {key: jsonable(value) for key, value in engine.facts.items()},
        "built": [{**asdict(reason), "value": jsonable(reason.value)} for reason in once_built(engine)],
        "defaults": {f.name: jsonable(getattr(defaults, f.name)) for f in fields(defaults)},
        "has_tokenizer": engine.tokenizer is not None,
        "has_chat_template": engine.tokenizer is not None and engine.tokenizer.chat_template is not None,
    }


# ------------------------------------------------------------------------------------------------------ parameters


def parameters(defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every field of SamplingParams: its group, how a value is written, what it means, and what stands in its place.

    kind      int, float, bool, text, strings (one a line), ids, json
    default   of a request that leaves it out, from `defaults`
    nullable  whether null is a value of its own
    """
    texts = _field_texts(SamplingParams)
    found = [
        {
            "name": f.name,
            "group": _group(f.name),
            "kind": SHAPES.get(f.name) or str(f.type).partition(" |")[0],
            "nullable": "None" in str(f.type) or f.name in SHAPES,
            "default": defaults.get(f.name),
            "text": texts.get(f.name, ""),
        }
        for f in fields(SamplingParams)
    ]
    order = [*GROUPS, OTHER]
    return sorted(found, key=lambda one: (order.index(one["group"]), _place(one["name"])))


def _group(name: str) -> str:
    return next((group for group, names in GROUPS.items() if name in names), OTHER)


def _place(name: str) -> int:
    group = GROUPS.get(_group(name), ())
    return group.index(name) if name in group else 0


def _field_texts(cls: type) -> dict[str, str]:
    """{field: its line of the class's docstring}; empty where docstrings were left out."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    return {match[1]: match[2] for line in lines if (match := _LINE.match(line))}


def stages(config: Config, plugins: Registry) -> list[dict[str, Any]]:
    """The deployed pipeline in its order.

    switchable  whether a request may switch it: stages that keep promises, and the draw, cannot be
    """
    return [_stage(one.key, one.name, plugins) for one in config.sampler.stages]


def _stage(key: str, name: str, plugins: Registry) -> dict[str, Any]:
    """A stage that says what it is only once it is built tells nothing but its name."""
    spec = getattr(plugins.load_target("stage", name), "spec", None)
    return {
        "key": key,
        "plugin": name,
        "kind": getattr(spec, "kind", None),
        "params": list(getattr(spec, "params", ())),
        "extra_args": list(getattr(spec, "extra_args", ())),
        "switchable": not getattr(spec, "essential", False) and getattr(spec, "kind", None) != "select",
    }


# --------------------------------------------------------------------------------------------------- configuration


def settings(service: Service) -> list[dict[str, Any]]:
    """Every value, with who set it where the command line told, then those of the server; secrets are covered."""
    rows = [(s.key, s.value, s.source, s.where) for s in service.settings]
    rows = rows or [(key, value, "", "") for key, value in _leaves(asdict(service.config))]
    rows += [(key, value, "", "") for key, value in _leaves(asdict(service.options), "server.")]
    return [
        {"key": key, "value": _covered(key, jsonable(value)), "source": source, "where": _covered_word(where)}
        for key, value, source, where in rows
    ]


def _leaves(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        is_inner = isinstance(value, Mapping) and bool(value)
        found += _leaves(value, f"{prefix}{key}.") if is_inner else [(f"{prefix}{key}", value)]
    return found


def _covered(key: str, value: Any) -> Any:
    """What stands in a secret's place says whether there is one."""
    return NOT_SHOWN if value and is_secret(key) else value


def _covered_word(where: str) -> str:
    """A word of the command line holds the values that it sets."""
    return f"{where.partition('=')[0]}={NOT_SHOWN}" if may_hold_secret(where) else where


def jsonable(value: Any) -> Any:
    """Plain data as it is, sets as lists, anything else by its own value or as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return jsonable(value.value) if hasattr(value, "value") else str(value)


# --------------------------------------------------------------------------------------------------------- plugins


def components(config: Config, plugins: Registry, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every announced component: whether this engine uses it, could, or why it cannot."""
    active = _active(config, facts)
    return [
        {
            "kind": spec.kind,
            "name": spec.name,
            "dist": spec.dist,
            "version": plugins.versions.get(spec.dist, "?"),
            "api": ".".join(map(str, spec.api)),
            "state": "active" if (spec.kind, spec.name) in active else "unusable" if reason else "usable",
            "reason": reason,
        }
        for spec in plugins.specs()
        for reason in [plugins.usable(spec.kind, spec.name)]
    ]


def _active(config: Config, facts: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(kind, name) of what was built: by the configuration, and by the facts where it left the choice open."""
    named = {(kind, getattr(config, group).name) for group, kind in COMPONENT_GROUPS.items()}
    chosen = {(kind, str(facts[kind])) for kind in ("backend", "attention", "model")}
    loader, stages = ("loader", config.engine.load_format), {("stage", one.name) for one in config.sampler.stages}
    return {*named, *chosen, *stages, loader, ("scheduler", config.scheduler.name), ("run", "serve")}
