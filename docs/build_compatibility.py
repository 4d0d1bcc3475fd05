"""Writes docs/compatibility.md: which choices go together, from what components declare and what the engine refuses.

`tested` is what `tests/docs/test_compatibility.py` runs, two choices at a time; `refused` is what start-up refuses,
with its own words; `unknown` is the rest. Run it after a change: `python docs/build_compatibility.py`. A test holds the
page against this file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from framework.config import (
    ComponentConfig,
    Config,
    EngineOptions,
    GrammarConfig,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
    compose,
)
from framework.engine.choice import choose
from framework.errors import ConfigError, FrameworkError
from framework.plugins import Registry, registry
from framework.request import SamplingParams
from framework.sampling.capabilities import check_composition
from framework.sampling.deployed import Deployed
from framework.sampling.fused import OF_ONE_STEP
from framework.testing.byte_model import MAX_MODEL_LEN, quiet, save_byte_model
from framework.testing.stage_bench import StageBench, StageCase, context
from framework.testing.stage_derive import derived

PAGE = Path(__file__).resolve().parent / "compatibility.md"
PIPELINES = ("greedy", "gumbel", "full", "mirostat")
WORDS = {
    "async": "engine.async_scheduling=true",
    "batch_invariant": "engine.batch_invariant=true",
    "drafts": "draft tokens",
}
"""Words that an engine asks every stage to keep, and what asks for them; the contract suite checks each."""
KINDS = ("backend", "attention", "policy", "kv_connector", "grammar")


@dataclass(frozen=True, eq=False)
class Value:
    """One choice: parts of a Config, by group."""

    factor: str
    name: str
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.factor}={self.name}"


def values(plugins: Registry) -> list[Value]:
    """Every choice of the page."""
    found = [
        Value(kind, spec.name, {kind: _chosen(kind, spec.name)})
        for kind in KINDS
        for spec in plugins.specs(kind)
        if plugins.usable(kind, spec.name) is None
    ]
    found += [Value(kind, "none", {kind: _chosen(kind, "none")}) for kind in ("kv_connector", "grammar")]
    found += [Value("engine.dtype", name, {"engine": {"dtype": name}}) for name in ("float32", "bfloat16", "float16")]
    for key, group in (("async_scheduling", "engine"), ("batch_invariant", "engine"), ("prefix_caching", "kv_cache"),
                       ("chunked_prefill", "scheduler")):  # fmt: skip
        found += [Value(f"{group}.{key}", str(on).lower(), {group: {key: on}}) for on in (False, True)]
    found += [Value("scheduler.preemption", n, {"scheduler": {"preemption": n}}) for n in ("recompute", "swap")]
    found += [Value("sampler", name, {"sampler": compose([f"sampler={name}"]).sampler}) for name in PIPELINES]
    return sorted(found, key=lambda value: value.factor)


def _chosen(kind: str, name: str) -> ComponentConfig | GrammarConfig:
    return GrammarConfig(name) if kind == "grammar" else ComponentConfig(name)


def config_of(model: Path, chosen: tuple[Value, ...], **limits: Any) -> Config:
    """The configuration of these choices, all else at its default. limits: more of `kv_cache`."""
    groups: dict[str, Any] = {"engine": {}, "kv_cache": dict(limits), "scheduler": {}, "sampler": SamplerConfig()}
    for value in chosen:
        for group, part in value.parts.items():
            groups[group] = {**groups[group], **part} if isinstance(part, dict) else part
    engine = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, **groups.pop("engine")}
    return Config(
        model=ModelConfig(path=str(model)),
        engine=EngineOptions(**engine),
        kv_cache=KVCacheConfig(**groups.pop("kv_cache")),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, **groups.pop("scheduler")),
        **groups,
    )


def refusal(model: Path, plugins: Registry, *chosen: Value) -> str | None:
    """What start-up says of the choices together, None if it takes them."""
    try:
        choose(config_of(model, chosen, num_blocks=64), plugins)
    except FrameworkError as error:
        return str(error).replace(str(model), "MODEL")
    return None


def refused_pairs(model: Path, plugins: Registry, all_values: list[Value]) -> dict[tuple[str, str], str]:
    """{(label, label): why} of pairs that start-up refuses, each in both orders."""
    found = {}
    for one, other in combinations(all_values, 2):
        if one.factor != other.factor and (why := refusal(model, plugins, one, other)) is not None:
            found[one.label, other.label] = found[other.label, one.label] = why
    return found


# ---------------------------------------------------------------------------------------------------------- stages


@cache
def stage_cases(plugins: Registry) -> dict[str, StageCase]:
    """{stage: the case that its contract suite runs it with}, of stages for which there is one."""
    cases = {}
    for spec in plugins.specs("stage"):
        named, target = plugins.load_cases(spec), plugins.load_target("stage", spec.name)
        try:
            cases[spec.name] = named or derived(target, plugins.build_options("stage", spec.name, {}))
        except ConfigError:
            continue
    return cases


def composed(plugins: Registry, names: list[str], required: frozenset[str] = frozenset()) -> str | None:
    """What the solver says of a pipeline of these stages and `gumbel`, None if it takes it."""
    rank = {"mask": 0, "elementwise": 1, "threshold": 2, "select": 3, "observe": 4}
    targets = {name: plugins.load_target("stage", name) for name in names}
    if not any(target.spec.kind == "select" for target in targets.values()):
        targets["gumbel"] = plugins.load_target("stage", "gumbel")
    ordered = sorted(targets.items(), key=lambda item: rank[item[1].spec.kind])
    stages = [Deployed(n, t.spec, None, context(t.spec), 1 << i) for i, (n, t) in enumerate(ordered)]
    try:
        check_composition(stages, required)
    except ConfigError as error:
        return str(error)
    return None


def with_every_stage(model: Path, plugins: Registry, select: str) -> Config:
    """An engine whose pipeline holds every stage there is, and of the select stages this one."""
    full = [stage for stage in compose(["sampler=full"]).sampler.stages if stage.name != "gumbel"]
    kinds = {stage.name: plugins.load_target("stage", stage.name).spec.kind for stage in full}
    before = [stage for stage in full if kinds[stage.name] != "observe"]
    behind = [stage for stage in full if kinds[stage.name] == "observe"]
    sampler = SamplerConfig("every", (*before, StageConfig(select, select), *behind))
    return config_of(model, (Value("sampler", "every", {"sampler": sampler}),), num_blocks=400)


def stage_pairs(plugins: Registry) -> dict[tuple[str, str], str]:
    """{(stage, stage): tested, refused or unknown}, each in both orders."""
    cases, found = stage_cases(plugins), {}
    for one, other in combinations([spec.name for spec in plugins.specs("stage")], 2):
        state = "unknown"
        if composed(plugins, [one, other]) is not None:
            state = "refused"
        elif one in cases and other in cases:
            state = "tested" if _are_served(cases[one], cases[other]) else "refused"
        found[one, other] = found[other, one] = state
    return found


def _are_served(one: StageCase, other: StageCase) -> bool:
    """Whether each of the two stages takes a request that uses both."""
    params = merged(one, other)
    try:
        for case in (one, other):
            StageBench(case).stage.validate(params)
    except ValueError:
        return False
    return True


def merged(one: StageCase, other: StageCase) -> SamplingParams:
    """Parameters that use both stages, of a few tokens."""
    first, second = one.wanting[0], other.wanting[-1]
    own = {**(first.extra_args or {}), **(second.extra_args or {})}
    named = {name: getattr(p, name) for p in (first, second) for name in p.named if name != "extra_args"}
    named = {"seed": 5, **named, "max_tokens": 3, "min_tokens": min(3, named.get("min_tokens", 0))}
    return SamplingParams(**named, extra_args=own or None)


# ------------------------------------------------------------------------------------------------------------ page


def page() -> str:
    plugins = registry()
    with tempfile.TemporaryDirectory() as folder, quiet():
        model = save_byte_model(Path(folder))
        all_values = values(plugins)
        refused = refused_pairs(model, plugins, all_values)
    blocks = [INTRODUCTION, *_parts(all_values, refused), *_words(plugins), *_pairs(plugins)]
    return "\n\n".join(blocks) + "\n"


INTRODUCTION = """\
# What goes together

`tested`: a test runs the two together. `refused`: start-up refuses them, naming both and the way out, before anything
is loaded. `unknown`: neither. Written by `python docs/build_compatibility.py` from what the components declare and what
the engine itself says; of a plugin of yours `python -m framework check` and the start of an engine say the same.

```python
from framework.plugins import registry

print("drafts" in registry().load_target("stage", "min_p").spec.caps.keeps)
```

```text
True
```"""


def _parts(all_values: list[Value], refused: Mapping[tuple[str, str], str]) -> Iterator[str]:
    factors = list(dict.fromkeys(value.factor for value in all_values))
    rows = []
    for one in all_values:
        cells = []
        for factor in factors:
            others = [v for v in all_values if v.factor == factor]
            bad = [v.name for v in others if (one.label, v.label) in refused]
            state = f"refused: {', '.join(bad)}" if bad else "tested"
            cells.append("" if factor == one.factor else state)
        rows.append([f"`{one.label}`", *cells])
    yield "## Parts of an engine\n\nA row is a choice, a column the choices of one key."
    yield _table(["", *(f"`{factor}`" for factor in factors)], rows)
    reasons = sorted({(*sorted(pair), why) for pair, why in refused.items()})
    if reasons:
        yield "\n".join(f"- `{one}` with `{other}`: {why}" for one, other, why in reasons)


def _words(plugins: Registry) -> Iterator[str]:
    cases = stage_cases(plugins)
    rows = []
    for spec in plugins.specs("stage"):
        name, keeps = spec.name, plugins.load_target("stage", spec.name).spec.caps.keeps
        cells = []
        for word in WORDS:
            is_refused = word not in keeps
            assert (composed(plugins, [name], frozenset({word})) is not None) == is_refused, (name, word)
            cells.append("refused" if is_refused else "tested" if name in cases else "unknown")
        rows.append([f"`{name}`", *cells, "tested" if name in cases else "unknown", _place(plugins, name)])
    yield "## Sampler stages and modes of the engine"
    yield PLACES
    yield _table(["", *WORDS.values(), "preemption", "where it runs"], rows)


PLACES = """\
On a backend that captures steps a stage is `inside` of the captured step where it is `graph_safe` (the contract suite
records such steps and runs them again for other rows), or where the backend has an operation in its place. A step whose
rows want another stage runs its sampler `behind` the captured part: [performance.md](performance.md)."""


def _place(plugins: Registry, name: str) -> str:
    """Where a step that is captured runs the stage, with a backend that has every operation."""
    spec = plugins.load_target("stage", name).spec
    if spec.kind == "observe" or spec.fused in OF_ONE_STEP or (spec.kind == "select" and spec.fused is None):
        return "behind"
    if spec.fused is not None and "kept_set" in spec.caps.keeps:
        return "inside, as an operation"
    return "inside" if "graph_safe" in spec.caps.keeps else "behind"


def _pairs(plugins: Registry) -> Iterator[str]:
    pairs = stage_pairs(plugins)
    names = [spec.name for spec in plugins.specs("stage")]
    rows = []
    for name in names:
        lists = {
            state: [o for o in names if pairs.get((name, o)) == state] for state in ("tested", "refused", "unknown")
        }
        rest = [o for o in names if o != name and o not in lists["refused"] and o not in lists["unknown"]]
        tested = "all others" if lists["tested"] == rest and rest else ", ".join(lists["tested"]) or "-"
        rows.append([f"`{name}`", tested, *(", ".join(lists[s]) or "-" for s in ("refused", "unknown"))])
    yield "## Sampler stages with each other"
    yield _table(["", "tested with", "refused with", "unknown with"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.name)


if __name__ == "__main__":
    main()
