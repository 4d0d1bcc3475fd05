"""Composes the YAML files with Hydra and turns the result into frozen dataclasses, every node checked.

Hydra and omegaconf are imported here, in origins, sweep and the command line alone. Hydra's global state is not
touched: composing works inside somebody else's Hydra program, in threads, and any number of times in a process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from framework.config import (
    COMPONENT_GROUPS,
    ComponentConfig,
    Config,
    EngineOptions,
    GrammarConfig,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
)
from framework.discovery import conf_roots, group_options, search_roots
from framework.errors import ConfigError, did_you_mean
from framework.plugins import registry
from framework.promised import refuse_key
from framework.request import SamplingParams
from framework.runs import RunArgs
from framework.runs.options import SweepOptions
from framework.server.metrics_slo import Objectives
from framework.server.options import ServerOptions
from framework.stage_order import Place, solve_order
from framework.words import RUN_TEXTS, TEXT_KEYS, Roots, Vocabulary, override_words

NODES = ("model", "engine", "kv_cache", "scheduler", "sampler", *COMPONENT_GROUPS, "run", "bench", "server", "sweep")
UNBOUND = {"auto", "none"}
"""Names that stand for no component: the builder chooses one, or there is none."""
STAGES = "sampler.stages."
PLACE_KEYS = ("order", "before", "after")
_OF_THE_PARSER = ("Lexer", "mismatched input", "no viable alternative", "extraneous input", "token recognition error")
"""How sentences of Hydra's parser about itself begin: they help nobody with a word."""
PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name != "stages")  # sampler.stages is the pipeline itself

_hydra_lock = threading.Lock()


def compose_config(words: Sequence[str]) -> Config:
    """The Config of `LLM(overrides=words)`. Raises ConfigError, PluginError or NotBuiltError, in one line."""
    roots = search_roots()
    return parts_of(load(override_words(words, Vocabulary.read(roots)), roots))[0]


def load(hydra_words: Sequence[str], roots: Roots, config_name: str = "config") -> DictConfig:
    """The composed tree of words that `framework.words` has rewritten. ConfigError for what Hydra refuses."""
    with loader_of(roots) as loader:
        return loader.load_configuration(config_name, list(hydra_words), RunMode.RUN, from_shell=False)


@contextmanager
def loader_of(roots: Roots) -> Iterator[ConfigLoaderImpl]:
    """Hydra's loader over `roots`. What it refuses inside of the context is a ConfigError of one line."""
    Plugins.instance()  # its first use registers the sources behind pkg:// and file://
    search_path = ConfigSearchPathImpl()
    search_path.append("hydra", "pkg://hydra.conf")
    for number, (dist, folder) in enumerate(roots):
        search_path.append("main" if number == 0 else dist, f"file://{folder}")
    search_path.append("schema", "structured://")
    with _version_base_restored():
        try:
            yield ConfigLoaderImpl(config_search_path=search_path)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error)) from error


def parts_of(cfg: DictConfig) -> tuple[Config, ComponentConfig, RunArgs]:
    """Frozen dataclasses of a composed tree; every key is known and every value has its type, or an error names it."""
    nodes = {str(key): _plain(cfg, str(key)) for key in cfg if key != "hydra"}
    _refuse_unknown("", nodes, (*NODES, *TEXT_KEYS))
    for group in NODES:
        if not isinstance(nodes.get(group), dict):
            raise ConfigError(f"{group}: must be a mapping of keys, got {nodes.get(group)!r}")
    config = Config(
        model=_model(nodes["model"]),
        engine=_engine(nodes["engine"]),
        kv_cache=KVCacheConfig(**conform(KVCacheConfig, nodes["kv_cache"], "kv_cache")),
        scheduler=_scheduler(nodes["scheduler"]),
        sampler=_sampler(nodes["sampler"]),
        grammar=_grammar(nodes["grammar"]),
        **{group: _component(group, nodes[group]) for group in COMPONENT_GROUPS if group != "grammar"},
        trace=_text("trace", nodes),
    )
    run = _component("run", nodes["run"])
    return config, run, _run_args(nodes, run.options)


def one_line(error: BaseException) -> str:
    """The first line of an error that says something; what Hydra and omegaconf write below it is about themselves."""
    cause = error.__cause__ or error.__context__
    text = str(error).strip() or (str(cause).strip() if cause else "")
    key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override.lstrip("+"), line)
    if several := re.fullmatch(r"Ambiguous value for argument '\+*(.*)'", line):
        key, _, value = several[1].partition("=")
        return (
            f"{several[1]}: several values for one key. Add --multirun to the command line to run each of them,"
            f" write {key}=[{value}] for a list, or {key}=\"'{value}'\" for a text"
        )
    if absent := re.fullmatch(r"Could not delete from config. '(.*)' does not exist.", line):
        return _nothing_to_delete(absent[1])
    if absent := re.fullmatch(r"Could not (?:override|delete) '(.*?)'.*", line):
        return f"{absent[1]}: there is no such key or group. Correct it, or leave it out; --help lists the groups"
    return f"{key}: {line}" if key and key not in line else line


def _unreadable(word: str, line: str) -> str:
    """What is said of a word that Hydra's grammar does not know; `line` is Hydra's own sentence."""
    key, _, value = word.partition("=")
    if any(value.count(quote) % 2 for quote in "'\""):
        return f"{word}: a quote is not closed. Close it, or write {key}=\"'TEXT'\" for a text"
    if line.startswith(_OF_THE_PARSER):
        line = "cannot be read. A key is names joined by dots, as in engine.seed=3; quote a value with special signs"
    return f"{word}: {line}"


def _nothing_to_delete(key: str) -> str:
    stage = key.removeprefix(STAGES)
    if stage != key and "." not in stage:
        known = set(group_options(conf_roots()).get("sampler/stage", {})) - {stage}
        return f"{key}: this pipeline has no stage '{stage}' to remove.{did_you_mean(stage, known)} Leave the word out"
    return f"~{key}: there is no value to delete. Write {key}=null to leave it unset"


# ------------------------------------------------------------------------------------------------------ nodes


def _model(node: Mapping[str, Any]) -> ModelConfig:
    config = ModelConfig(**conform(ModelConfig, node, "model"))
    if config.name != "auto":
        registry().spec("model", config.name)
    return config


def _engine(node: Mapping[str, Any]) -> EngineOptions:
    # `off` is false to YAML, though not on the command line.
    node = {**node, "graphs": "off"} if node.get("graphs") is False else node
    options = EngineOptions(**conform(EngineOptions, node, "engine"))
    if options.load_format != "auto":
        registry().spec("loader", options.load_format)
    return options


def _scheduler(node: Mapping[str, Any]) -> SchedulerConfig:
    own = [f.name for f in fields(SchedulerConfig) if f.name != "options"]
    values = conform(
        SchedulerConfig, {key: node[key] for key in own if key in node}, "scheduler", leave_out=("options",)
    )
    theirs = {key: value for key, value in node.items() if key not in own}
    return SchedulerConfig(**values, options=_options("scheduler", values["name"], theirs, "scheduler", own))


def _grammar(node: Mapping[str, Any]) -> GrammarConfig:
    own = ("name", "reasoning_end", "max_compiled")
    values = conform(GrammarConfig, {key: node[key] for key in own if key in node}, "grammar", leave_out=("options",))
    theirs = {key: value for key, value in node.items() if key not in own}
    return GrammarConfig(**values, options=_options("grammar", _name("grammar", node), theirs, "grammar", own))


def _component(group: str, node: Mapping[str, Any]) -> ComponentConfig:
    name = _name(group, node)
    rest = {key: value for key, value in node.items() if key != "name"}
    return ComponentConfig(name, _options(COMPONENT_GROUPS.get(group, group), name, rest, group, ("name",)))


def _sampler(node: Mapping[str, Any]) -> SamplerConfig:
    _refuse_stage_without_package(node.get("stage"))
    _refuse_unknown("sampler.", node, ("name", "stages", "logprobs_mode", *PARAMS))
    params = {key: node[key] for key in PARAMS if node.get(key) is not None}
    try:
        SamplingParams(**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error).replace("SamplingParams.", "sampler.", 1)) from error
    stages = _stages(node.get("stages"))
    return SamplerConfig(_name("sampler", node), stages, node.get("logprobs_mode"), params)  # type: ignore[arg-type]


def _refuse_stage_without_package(node: Any) -> None:
    """Hydra puts a file of sampler/stage under `sampler.stage` unless its first line says another place."""
    if isinstance(node, dict) and isinstance(node.get("name"), str):
        name = node["name"]
        raise ConfigError(
            f"sampler.stage: the YAML file of stage '{name}' lacks the line that says where it belongs."
            f" Begin it with: # @package sampler.stages.{name}"
        )


def _stages(nodes: Any) -> tuple[StageConfig, ...]:
    if not isinstance(nodes, dict):
        raise ConfigError("sampler.stages must map names to stages. Choose a pipeline, such as sampler=gumbel")
    for key, node in nodes.items():
        if not isinstance(node, dict | None):
            raise ConfigError(
                f"sampler.stages.{key}={node!r} must be a mapping with a name, or null to remove the stage"
            )
    present = {key: node for key, node in nodes.items() if node is not None}
    configs = {key: _stage(key, node) for key, node in present.items()}
    places = {key: _place(f"sampler.stages.{key}", node) for key, node in present.items()}
    return tuple(configs[key] for key in solve_order(places, _absent_places(places, nodes)))


def _stage(key: str, node: Mapping[str, Any]) -> StageConfig:
    path = f"sampler.stages.{key}"
    name = _name(path, node)
    rest = {word: value for word, value in node.items() if word not in ("name", *PLACE_KEYS)}
    return StageConfig(key, name, _options("stage", name, rest, path, ("name", *PLACE_KEYS)))


def _place(path: str, node: Mapping[str, Any]) -> Place:
    order = node.get("order")
    if order is not None and (isinstance(order, bool) or not isinstance(order, int | float) or order != order):
        raise ConfigError(f"{path}.order={order!r} must be a number; ours stand at 100, 200, ... 1100")
    anchors = {}
    for word in ("before", "after"):
        names = [node[word]] if isinstance(node.get(word), str) else node.get(word) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{path}.{word}={node[word]!r} must be the name of a stage or a list of names")
        anchors[word] = tuple(names)
    return Place(order, **anchors)


def _absent_places(places: Mapping[str, Place], nodes: Mapping[str, Any]) -> dict[str, Place]:
    """Places of stages that some anchor may name though this pipeline lacks them: removed, or of another sampler."""
    named = {name for place in places.values() for name in (*place.before, *place.after)}
    if named <= set(places):
        return {}
    absent = {key: Place() for key in nodes}
    for option, (_, path) in group_options(conf_roots()).get("sampler/stage", {}).items():
        absent[option] = _place(f"sampler/stage/{option}.yaml", yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return absent


def _run_args(nodes: Mapping[str, Any], options: Mapping[str, Any]) -> RunArgs:
    texts: dict[str, Any] = {key: _text(key, nodes) for key in RUN_TEXTS}
    for key in ("prompt", "system"):
        texts[key] = _read_at(key, texts[key])
    server = _server(nodes["server"])
    sweep = SweepOptions(**conform(SweepOptions, nodes["sweep"], "sweep"))
    bench = _component("bench", nodes["bench"])
    return RunArgs(**texts, options=options, bench=bench, server=server, sweep=sweep)


def _server(node: Mapping[str, Any]) -> ServerOptions:
    slo, rest = node.get("slo") or {}, {key: value for key, value in node.items() if key != "slo"}
    if not isinstance(slo, Mapping):
        raise ConfigError(f"server.slo={slo} names no objective. Use server.slo.{fields(Objectives)[0].name}={slo}")
    objectives = Objectives(**conform(Objectives, slo, "server.slo"))
    return ServerOptions(slo=objectives, **conform(ServerOptions, rest, "server", leave_out=("slo",)))


def _text(key: str, nodes: Mapping[str, Any]) -> str | None:
    text = nodes.get(key)
    if not isinstance(text, str | None):
        raise ConfigError(f"{key}={text!r} must be text. In a YAML file, quote it")
    return text


def _read_at(key: str, text: str | None) -> str | None:
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            f"{key}={text}: cannot read the file ({reason}). Text that begins with @ goes in a file"
        ) from None


# ----------------------------------------------------------------------------------------------------- checks


def conform(cls: type, values: Mapping[str, Any], path: str, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """`values` as fields of the dataclass `cls`, defaults filled in, each value converted to its field's type.

    ConfigError names the key for an unknown one (with the nearest), a value of the wrong type, or a missing one.
    """
    assert is_dataclass(cls), f"{cls} of {path} is no dataclass"
    hints = get_type_hints(cls)
    known = [f for f in fields(cls) if f.init and f.name not in leave_out]
    _refuse_unknown(f"{path}.", values, [f.name for f in known])
    for name, value in values.items():
        _refuse_lossy(f"{path}.{name}", hints[name], value)
    schema = make_dataclass(cls.__name__, [(f.name, hints[f.name], _default(f)) for f in known], kw_only=True)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), dict(values))
        return dict(OmegaConf.to_container(merged, throw_on_missing=True))  # type: ignore[arg-type]
    except MissingMandatoryValue as error:
        raise ConfigError(f"{path}.{error.full_key} needs a value. Add {path}.{error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}.{one_line(error)}") from error


def _options(kind: str, name: str, values: Mapping[str, Any], path: str, also: Sequence[str]) -> Mapping[str, Any]:
    """Options of a component, checked with its own config dataclass; without one it takes none.

    also  keys of the node that are not options, for the message
    """
    spec = None if name in UNBOUND else registry().spec(kind, name)
    cls = None if spec is None else registry().load_config_class(spec)
    known = (*also, *(() if cls is None else (f.name for f in fields(cls))))
    _refuse_unknown(f"{path}.", values, known, lambda key: "" if "." in path else _owner(path, kind, key))
    return {} if cls is None else conform(cls, values, path)


def _owner(group: str, kind: str, key: str) -> str:
    """What is said of an option that another component of the group has: choosing that one was forgotten, as a rule."""
    classes = {spec.name: registry().load_config_class(spec) for spec in registry().specs(kind)}
    owners = [f"{group}={name}" for name, cls in classes.items() if cls and key in (f.name for f in fields(cls))]
    return f" It is an option of {' or '.join(owners)}: choose that as well, or leave it out." if owners else ""


def _name(path: str, node: Mapping[str, Any]) -> str:
    name = node.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{path}.name={name!r} must name a component. Choose it by its group, or write {path}.name=NAME"
        )
    return name


def _refuse_unknown(
    prefix: str, values: Mapping[str, Any], known: Sequence[str], owner: Callable[[str], str] = lambda key: ""
) -> None:
    """owner: what is said of a key that nothing known is near to."""
    for key in values:
        if key not in known:
            refuse_key(f"{prefix}{key}")
            hint = did_you_mean(str(key), known) or owner(str(key))
            raise ConfigError(f"{prefix}{key}: there is no such key.{hint} Known: {', '.join(known)}")


def _refuse_lossy(key: str, hint: Any, value: Any) -> None:
    """omegaconf would turn 1.5 into 1 for an integer, and a number or a switch into text."""
    kinds = set(get_args(hint)) or {hint}
    if isinstance(value, float) and int in kinds and float not in kinds:
        raise ConfigError(f"{key}: Value '{value}' of type 'float' could not be converted to Integer")
    if isinstance(value, int | float) and value not in (0, 1) and kinds <= {bool, type(None)}:
        raise ConfigError(f"{key}: Value '{value}' of type '{type(value).__name__}' must be true or false")
    if isinstance(value, bool) and str in kinds and bool not in kinds:
        raise ConfigError(f"{key}: Value '{value}' of type 'bool' must be a word. In a YAML file, quote it")


def _default(item: Any) -> Any:
    if item.default_factory is not MISSING:
        return field(default_factory=item.default_factory)
    return field(default="???" if item.default is MISSING else item.default)


def _plain(cfg: DictConfig, key: str) -> Any:
    try:
        node = cfg[key]
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


@contextmanager
def _version_base_restored() -> Iterator[None]:
    """Hydra notes a default `version_base` in a global when there is none yet; takes it back for the program around."""
    with _hydra_lock:
        before = VersionBase.instance().version_base
        try:
            yield
        finally:
            VersionBase.instance().version_base = before
