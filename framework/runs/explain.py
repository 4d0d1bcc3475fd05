"""`run=explain`: each value and who set it, what was chosen automatically and why, the solved pipeline.

Reads the checkpoint's header and no weight; what only a built engine knows is told with `run.build=true`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from framework.config import COMPONENT_GROUPS, build_options
from framework.plugins import Registry, registry
from framework.runs import Setting
from framework.runs.options import ExplainOptions
from framework.runs.table import paragraph, table, terminal_width, title
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.engine.choice import Choice
    from framework.engine.reasons import Reason
    from framework.runs import RunArgs
    from framework.sampling.deployed import Deployed


@dataclass(frozen=True)
class PipelineStage:
    """A stage of the solved pipeline.

    place         why it stands where it stands
    parameters    fields of SamplingParams that it reads; extra_args: names of its own ones
    needs, keeps  its words in the solved composition, see `interfaces.Capabilities`
    """

    key: str
    plugin: str
    kind: str
    place: str
    parameters: tuple[str, ...]
    extra_args: tuple[str, ...]
    needs: tuple[str, ...]
    keeps: tuple[str, ...]


def run(config: Config, args: RunArgs) -> None:
    """Prints tables, or one JSON object with `run.json=true`."""
    _refuse(args)
    options = build_options(ExplainOptions, args.options, "run")
    known = args.settings()
    settings = [*known, *_code_defaults(config, {s.key for s in known})]
    if not options.json:  # before anything is chosen: what is wrong is easier to see beside who said it
        _print(_setting_lines(settings))
    from framework.engine.choice import choose
    from framework.engine.reasons import automatic

    plugins = registry()
    choice = choose(config, plugins)
    reasons, stages = automatic(choice, plugins), pipeline(choice, settings)
    built = _build(choice, plugins) if options.build else []
    if options.json:
        print(json.dumps(_report(settings, reasons, stages, built), indent=1, default=_jsonable, ensure_ascii=False))
    else:
        words = [_capability_lines(stages)] if options.capabilities else []
        _print(_reason_lines(reasons), _stage_lines(stages), *words, _built_lines(built))


def _refuse(args: RunArgs) -> None:
    refuse_texts("explain", args, dict.fromkeys(("prompts_file", "output", "target"), "leave it out"))
    refuse_unread("explain", args, OF_BENCH)


def _code_defaults(config: Config, known: set[str]) -> list[Setting]:
    """Options of components that no file names: their own config class gave them."""
    found = []
    for group, kind in (*COMPONENT_GROUPS.items(), ("scheduler", "scheduler")):
        part = getattr(config, group)
        found += _options_of(kind, part.name, part.options, group, known)
    for stage in config.sampler.stages:
        found += _options_of("stage", stage.name, stage.options, f"sampler.stages.{stage.key}", known)
    return found


def _options_of(kind: str, name: str, options: Mapping[str, Any], prefix: str, known: set[str]) -> list[Setting]:
    missing = {key: value for key, value in options.items() if f"{prefix}.{key}" not in known}
    if not missing:
        return []
    spec = registry().spec(kind, name)
    return [
        Setting(f"{prefix}.{key}", value, "plugin", f"{spec.config} of {spec.dist}") for key, value in missing.items()
    ]


def pipeline(choice: Choice, settings: Sequence[Setting]) -> list[PipelineStage]:
    """The stages in the order in which they run, each with the reason of its place."""
    return [_stage(one, _place(one.key, settings)) for one in choice.pipeline.stages]


def _stage(one: Deployed, place: str) -> PipelineStage:
    spec, caps = one.spec, one.spec.caps
    return PipelineStage(
        key=one.key,
        plugin=spec.name,
        kind=spec.kind,
        place=place,
        parameters=spec.params,
        extra_args=spec.extra_args,
        needs=tuple(sorted(caps.needs)),
        keeps=tuple(sorted(caps.keeps)),
    )


def _place(key: str, settings: Sequence[Setting]) -> str:
    """What places a stage: its order, or the stages that it stands beside."""
    prefix, said = f"sampler.stages.{key}.", []
    for setting in settings:
        word = setting.key.removeprefix(prefix)
        if setting.key.startswith(prefix) and word in ("order", "before", "after") and setting.value not in (None, []):
            value = ", ".join(setting.value) if isinstance(setting.value, list) else setting.value
            said.append(f"{word} {value} ({setting.where})")
    return "; ".join(said) or "as the configuration lists it"


def _build(choice: Choice, plugins: Registry) -> list[Reason]:
    from framework.engine.build import build_chosen
    from framework.engine.reasons import once_built

    engine = build_chosen(choice, plugins)
    try:
        return once_built(engine)
    finally:
        engine.close()


# -------------------------------------------------------------------------------------------------------- printing


def _print(*sections: list[str]) -> None:
    for lines in sections:
        print("\n".join(lines), end="\n\n", flush=True)


def _setting_lines(settings: Sequence[Setting]) -> list[str]:
    """A row a value; values that nobody set stand together in one line a file."""
    width = terminal_width()
    unset = [s for s in settings if s.value is None and s.source != "command line"]
    rows = [("key", "value", "set by", "where")]
    rows += [(s.key, _text(s.value), s.source, s.where) for s in settings if s not in unset]
    lines = [title("Values and who set them"), *table(rows, width, "  ")]
    for where in dict.fromkeys(s.where for s in unset):
        keys = ", ".join(s.key for s in unset if s.where == where)
        lines += paragraph(f"null in {where}: {keys}", width, "  ")
    return lines


def _reason_lines(reasons: Sequence[Reason]) -> list[str]:
    rows = [("what", "chosen", "why"), *((r.key, "?" if r.value is None else _text(r.value), r.why) for r in reasons)]
    return [title("Chosen automatically"), *table(rows, terminal_width(), "  ")]


def _stage_lines(stages: Sequence[PipelineStage]) -> list[str]:
    rows = [("", "stage", "kind", "reads", "place")]
    rows += [(str(n), s.key, s.kind, ", ".join(s.parameters) or "-", s.place) for n, s in enumerate(stages, start=1)]
    return [title("Sampler pipeline, in the order in which it runs"), *table(rows, terminal_width(), "  ")]


def _capability_lines(stages: Sequence[PipelineStage]) -> list[str]:
    """What each stage needs of the others and of the engine, keeps, and does not keep although another one does."""
    known = sorted({word for stage in stages for word in stage.keeps})
    rows = [("stage", "own parameters", "needs", "does not keep", "keeps")]
    for s in stages:
        missing = [word for word in known if word not in s.keeps]
        own, needs, lacks, keeps = (", ".join(words) or "-" for words in (s.extra_args, s.needs, missing, s.keeps))
        rows.append((s.key, own, needs, lacks, keeps))
    return [title("What the stages need and keep"), *table(rows, terminal_width(), "  ")]


def _built_lines(built: Sequence[Reason]) -> list[str]:
    from framework.engine.reasons import WHEN_BUILT

    if not built:
        known = f"Known once the engine is built, with run.build=true: {', '.join(WHEN_BUILT)}"
        return paragraph(known, terminal_width())
    rows = [("what", "value", "why"), *((r.key, _text(r.value), r.why) for r in built)]
    return [title("The engine as it was built"), *table(rows, terminal_width(), "  ")]


def _text(value: Any) -> str:
    """As it would stand in YAML, or nearly."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) and value else json.dumps(value, default=_jsonable, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, frozenset | set) else getattr(value, "value", None) or str(value)


def _report(
    settings: Sequence[Setting], reasons: Sequence[Reason], stages: Sequence[PipelineStage], built: Sequence[Reason]
) -> dict[str, Any]:
    from framework.engine.reasons import WHEN_BUILT

    return {
        "settings": [asdict(s) for s in settings],
        "automatic": [asdict(r) for r in reasons],
        "pipeline": [asdict(s) for s in stages],
        "built": [asdict(r) for r in built],
        "known_once_built": [] if built else list(WHEN_BUILT),
    }
