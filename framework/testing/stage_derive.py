"""Parameters that use a sampler stage, found by trying: the case of a stage whose plugin brings none of its own.

Reads what the stage declares (`params`, `extra_args`) and asks its `validate` and `wants`; knows the fields of
SamplingParams and no stage. Called by `framework.testing.kits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from framework.errors import ConfigError
from framework.request import SamplingParams
from framework.testing.stage_bench import StageBench, StageCase, encode_words

EOS = (2,)
FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.5, 1.7),
    "top_k": (2, 7),
    "top_p": (0.1, 0.9),
    "min_p": (0.05, 0.5),
    "repetition_penalty": (1.3, 0.7),
    "frequency_penalty": (0.5, -0.5),
    "presence_penalty": (0.5, -1.0),
    "min_tokens": (3, 6),
    "logit_bias": ({5: 3.0, 10: -100.0}, {3: -1.5, 299: 4.0}),
    "allowed_token_ids": ((1, 3, 5, 7, 10, 200), tuple(range(100, 300))),
    "bad_words": (("w5", "w4 w7"), ("w10",)),
    "bad_words_token_ids": (((5,), (4, 7)), ((10,), (1, 2, 3))),
    "logprob_token_ids": ((5, 7), (200,)),
    "logprobs": (0, 3),
    "structured_outputs": ({"regex": "[a-d]{3,5}"}, {"choice": ["yes", "no", "yellow"]}),
    "seed": (3, 2**63),
}
"""Values that fields of SamplingParams are tried with."""
OWN: tuple[Any, ...] = (0.5, 2.0, 0.05, 0.9, 3, 7, 1, True, (5, 7), (10,), "w5", "w4 w7", 64)
"""Values that extra_args are tried with."""
OFF: tuple[Any, ...] = (0, 0.0, False, (), 1.0, -1)
MOST = 8
"""Parameters of a case, at most, that use the stage."""


def derived(target: Any, options: Any) -> StageCase:
    """A case of the stage. ConfigError when no two parameters are found that use it, or none that do not."""
    spec = target.spec
    bench = StageBench(StageCase(target, (), (), options, EOS, encode_words))
    stage = bench.stage
    plain = [p for p in (SamplingParams(), SamplingParams(temperature=0)) if _is_served(stage, p)]
    wanting = [p for p in plain if stage.wants(p)]
    plain = [p for p in plain if not stage.wants(p)]
    for params in _tried(spec.name, spec.params, spec.extra_args):
        if _is_served(stage, params) and _wants(stage, params) and _is_new(params, wanting):
            wanting.append(params)
    if len(wanting) == 1:
        wanting.append(wanting[0].replace(seed=3))
    for params in _own(spec.name, spec.extra_args, OFF):
        if len(plain) < 4 and _is_served(stage, params) and _wants(stage, params) is False:
            plain.append(params)
    way_out = (
        f"Its StageSpec says that it reads params={spec.params} and extra_args={spec.extra_args}: name there what is"
        " missing, or give its ComponentSpec cases='package.module:CASES', StageCases of framework.testing.stages"
    )
    if len(wanting) < 2:
        raise ConfigError(f"stage/{spec.name}: no two parameters were found that use it. {way_out}")
    if not plain and spec.kind != "select":
        raise ConfigError(f"stage/{spec.name}: every parameter that was tried uses it. {way_out}")
    return StageCase(target, tuple(wanting), tuple(plain), options, EOS, encode_words)


def _is_served(stage: Any, params: SamplingParams) -> bool:
    try:
        stage.validate(params)
    except Exception:  # whatever it objects to, it is no parameter to check the stage with
        return False
    return True


def _wants(stage: Any, params: SamplingParams) -> bool | None:
    """None where it cannot say: its `validate` lets a value pass that its `wants` cannot take, which a check names."""
    try:
        return bool(stage.wants(params))
    except Exception:
        return None


def _is_new(params: SamplingParams, wanting: list[SamplingParams]) -> bool:
    """Whether it says something that fewer than two of the others say: each parameter is there, and not only one."""
    said = [_said(one) for one in wanting]
    return len(wanting) < MOST and sum(_said(params) == one for one in said) < 2


def _said(params: SamplingParams) -> frozenset[str]:
    own = (name for given in (params.extra_args or {}).values() for name in given)
    return params.named | frozenset(own)


def _tried(name: str, fields: tuple[str, ...], extra_args: tuple[str, ...]) -> Iterator[SamplingParams]:
    yield SamplingParams(extra_args={name: {}})
    for place in (0, 1):
        for field in fields:
            if field in FIELDS:
                given: dict[str, Any] = {field: FIELDS[field][place]}
                if field == "min_tokens":
                    given["stop_token_ids"] = [3, 299]
                yield SamplingParams(**given)
    yield from _own(name, extra_args, OWN)


def _own(name: str, extra_args: tuple[str, ...], values: tuple[Any, ...]) -> Iterator[SamplingParams]:
    """Each of the stage's own parameters alone, then two at a time."""
    for count in (1, 2):
        for names in combinations(extra_args, count):
            for given in product(values, repeat=count):
                yield SamplingParams(extra_args={name: dict(zip(names, given, strict=True))})
