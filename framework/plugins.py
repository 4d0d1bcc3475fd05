"""The typed registry of components and the hooks that announce them. Imports no torch.

A component is chosen by (kind, name); its target is imported only when it is selected. pluggy carries announcements and
the observers' events; nothing inside a step goes through it.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pluggy

from framework import API_VERSION
from framework.config import build_options
from framework.discovery import OURS, PLUGIN_GROUP, dist_name, dist_version, entry_points_of, unknown_switches
from framework.errors import PluginError, as_typed, class_and_text, did_you_mean, in_one_line

if TYPE_CHECKING:
    from framework.request import RequestOutput

ANY = "*"
"""What a component provides that serves every value, and is taken only when it is named."""
KINDS = (
    "backend", "attention", "model", "scheduler", "policy", "stage", "drafter", "grammar",
    "kv_connector", "executor", "loader", "observer", "run", "bench",
)  # fmt: skip

hookspec = pluggy.HookspecMarker("framework")
hookimpl = pluggy.HookimplMarker("framework")

_log = logging.getLogger("framework")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class ComponentSpec:
    """What a plugin announces about one component: names only, so that announcing imports nothing heavy.

    target    "package.module:attribute", imported when the component is selected
    config    "package.module:Dataclass" of its options, from a module that imports no torch
    extra     name of the extra that installs its optional dependencies: pip install 'DIST[EXTRA]'
    probe     "package.module:function" -> None if usable on this machine, else the reason
    priority  `auto` takes the usable component of the highest priority
    provides  what it serves beside its name: architectures of a model (`ANY`: every one, when it is named itself), file
              formats of a loader, types of the devices that an attention computes on (none: it tells by itself)
    environment  of a backend, a run or a bench: "package.module:function" -> {variable: value} to set before torch is
              imported; those of the run go before the backend's
    cases     "package.module:CASES" that the contract suite of its kind (`run=check`) takes: a case, or several
    dist      distribution that announced it; the registry fills it in
    """

    kind: str
    name: str
    target: str
    config: str | None = None
    extra: str | None = None
    probe: str | None = None
    priority: int = 0
    provides: tuple[str, ...] = ()
    environment: str | None = None
    api: tuple[int, int] = (1, 0)
    cases: str | None = None
    dist: str = "?"


CORE_COMPONENTS = (
    ComponentSpec("scheduler", "default", "framework.scheduler.scheduler:Scheduler"),
    ComponentSpec("executor", "inprocess", "framework.worker.executor:InprocessExecutor"),
    ComponentSpec(
        "kv_connector",
        "faulty",
        "framework.testing.connector_faults:FaultyConnector",
        config="framework.testing.fault_options:FaultOptions",
        cases="framework.testing.faulty_cases:FAULTY",
    ),
    ComponentSpec("run", "generate", "framework.runs.generate:run"),
    ComponentSpec("run", "plugins", "framework.runs.plugins:run"),
    ComponentSpec("run", "chat", "framework.runs.chat:run", config="framework.runs.options:ChatOptions"),
    ComponentSpec("run", "explain", "framework.runs.explain:run", config="framework.runs.options:ExplainOptions"),
    ComponentSpec("run", "bench", "framework.runs.bench:run", config="framework.runs.options:BenchOptions"),
    ComponentSpec("run", "check", "framework.runs.check:run", config="framework.runs.options:CheckOptions"),
    ComponentSpec("run", "replay", "framework.runs.replay:run", config="framework.runs.replay_options:ReplayOptions"),
    ComponentSpec("run", "timeline", "framework.runs.timeline:run"),
    ComponentSpec(
        "run",
        "serve",
        "framework.runs.serve:run",
        extra="serve",
        environment="framework.runs.serve_environment:environment",
    ),
    ComponentSpec("run", "new", "framework.runs.new:run", config="framework.runs.options:NewOptions"),
    *(
        ComponentSpec(
            "bench",
            name,
            f"framework.runs.bench.{name}:{name.title()}",
            config=f"framework.runs.options:{name.title()}Options",
        )
        for name in ("throughput", "latency", "startup")
    ),
    ComponentSpec(
        "bench",
        "serve",
        "framework.runs.bench.serve:Serve",
        config="framework.runs.bench.serve.options:LoadOptions",
        extra="bench",
        environment="framework.runs.serve_environment:environment",
    ),
)
"""Components that the core itself provides; everything else comes through entry points, ours as well as others'."""


class FrameworkHooks:
    """Every hook that a plugin may implement, with `hookimpl`. An implementation may take fewer arguments."""

    @hookspec
    def framework_components(self) -> Iterable[ComponentSpec]:  # type: ignore[empty-body]
        """Components of the plugin. Called once, when the registry is loaded; must import nothing heavy."""

    @hookspec
    def on_request_added(self, request: Any) -> None:
        """A request (framework.request.Request) was admitted to the waiting queue."""

    @hookspec
    def on_step_end(self, stats: Any) -> None:
        """One step of the engine is over (framework.engine.stats.StepStats)."""

    @hookspec
    def on_step(self, scheduled: Any, tokens: Any, stats: Any, counts: Any) -> None:
        """One step of the engine: what was decided (framework.batch.SchedulerOutput), what came of it (a list of
        framework.request.NewTokens), the StepStats, and the scheduler's counters afterwards. Change nothing of it."""

    @hookspec
    def on_request_finished(self, request: Any, output: RequestOutput) -> None:
        """A request ended, for whatever reason. `output` is its last one: of a request that streams deltas, the last
        delta; `request.output_token_ids` are all of them."""

    @hookspec(firstresult=True)
    def select_backend(self, candidates: list[str]) -> str | None:
        """The backend that `backend=auto` takes, from usable ones, best first; None leaves the choice to others."""


EVENTS = {
    "on_request_added": ("request",),
    "on_step_end": ("stats",),
    "on_step": ("scheduled", "tokens", "stats", "counts"),
    "on_request_finished": ("request", "output"),
}


@dataclass(frozen=True)
class Failure:
    """A plugin, or one of its components, that was left out when the registry was loaded, and why."""

    plugin: str
    dist: str
    version: str
    reason: str
    whole: bool = True  # False: one component was refused, the plugin's others are there

    def __str__(self) -> str:
        return f"{self.plugin} of {self.dist} {self.version}: {self.reason}"


@dataclass(frozen=True)
class _Observer:
    plugin: str
    function: Callable[..., Any]
    arguments: tuple[int, ...]  # which of the event's values it takes


class EventBus:
    """Calls observers of engine events. One that raises is named in the log once and never called again.

    Returns at once when nobody observes; the engine emits once a step, never once a token.
    """

    def __init__(self, observers: dict[str, list[_Observer]] | None = None, parent: EventBus | None = None):
        self._observers = {event: list((observers or {}).get(event, ())) for event in EVENTS}
        self._parent = parent
        self._joined: list[Any] = []

    @classmethod
    def of(cls, manager: pluggy.PluginManager, built: Iterable[tuple[str, Any]] = ()) -> EventBus:
        """Hooks of the manager's plugins, then methods of the observers in `built`: [(name for the log, object)]."""
        observers = {
            event: [_observer(impl, names) for impl in _impls(manager, event)] for event, names in EVENTS.items()
        }
        for label, one in built:
            for event, methods in _methods(label, one).items():
                observers[event] += methods
        return cls(observers)

    def joined(self, label: str, one: Any) -> EventBus:
        """A bus of one engine: whoever hears this one hears it too, while `one` hears that engine alone.

        one  an observer; its `close`, if it has one, is called by the bus of the engine at its end
        """
        bus = EventBus(_methods(label, one), parent=self)
        if hasattr(one, "close"):
            bus._joined.append(one)
        return bus

    def close(self) -> None:
        """Ends what joined this bus and those that it joined, last first; observers of all engines go on."""
        try:
            for one in self._joined:
                one.close()
        finally:
            if self._parent is not None:
                self._parent.close()

    def has(self, *events: str) -> bool:
        """Whether anybody observes one of the events, for emitters whose values cost something to make."""
        for event in events:
            if self._observers[event]:
                return True
        return self._parent is not None and self._parent.has(*events)

    def emit(self, event: str, *values: Any) -> None:
        """Calls every observer of `event` with its values in the order of the hook's arguments. Raises nothing."""
        if self._parent is not None:
            self._parent.emit(event, *values)
        observers = self._observers[event]
        if not observers:
            return
        for observer in tuple(observers):
            try:
                observer.function(*[values[i] for i in observer.arguments])
            except Exception:
                observers.remove(observer)
                _log.exception("observer %s raised in %s and is dropped", observer.plugin, event)


class Registry:
    """All announced components by (kind, name), with what failed. Build a fresh one in a test with `Registry.load`."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.versions: dict[str, str] = {}
        self._events: EventBus | None = None
        self._events_lock = threading.Lock()
        self._specs: dict[tuple[str, str], ComponentSpec] = {}
        self._manager = pluggy.PluginManager("framework")
        self._manager.add_hookspecs(FrameworkHooks)
        self._probed: dict[tuple[str, str], str | None] = {}

    @classmethod
    def load(cls, entry_points: Iterable[EntryPoint] | None = None) -> Registry:
        """A registry of the core's components and of every plugin that can be imported; nothing a plugin does stops it.

        entry_points  stands in for those of the environment in tests
        """
        registry = cls()
        version = importlib.import_module("framework").__version__
        registry.versions[OURS] = version
        registry._announce("core", OURS, version, CORE_COMPONENTS)
        found = None if entry_points is None else list(entry_points)
        for sentence in unknown_switches(found):
            _log.warning(sentence)
        for ep in entry_points_of(PLUGIN_GROUP, found):
            registry._load_plugin(ep)
        return registry

    @property
    def events(self) -> EventBus:
        """The bus of hooks and of announced observers, which are built when it is first asked for: by an engine.

        An observer that cannot be built is named in the log and among the failures, and stops nothing.
        """
        with self._events_lock:
            if self._events is None:
                built = [(f"{spec.dist}:{spec.name}", self._build_observer(spec)) for spec in self.specs("observer")]
                self._events = EventBus.of(self._manager, [pair for pair in built if pair[1] is not None])
            return self._events

    def _build_observer(self, spec: ComponentSpec) -> Any:
        try:
            observer = self.load_target("observer", spec.name)()
            _check_events(observer)
        except (Exception, SystemExit) as error:
            version = self.versions.get(spec.dist, "?")
            reason = f"observer/{spec.name} cannot be built: {_one_line(error)}"
            self._fail(Failure(spec.name, spec.dist, version, reason, whole=False))
            return None
        return observer

    def specs(self, kind: str | None = None) -> list[ComponentSpec]:
        """Announced components, sorted by kind (in the order of KINDS) and name."""
        found = [spec for spec in self._specs.values() if kind in (None, spec.kind)]
        return sorted(found, key=lambda spec: (KINDS.index(spec.kind), spec.name))

    def spec(self, kind: str, name: str, key: str | None = None) -> ComponentSpec:
        """The announced component. PluginError lists what is installed, the nearest name, and what failed to import.

        key  of the configuration that names it; None = the kind
        """
        assert kind in KINDS, f"kind {kind!r} is none of {KINDS}"
        if (kind, name) in self._specs:
            return self._specs[kind, name]
        names = [spec.name for spec in self.specs(kind)]
        near = did_you_mean(name, names)
        raise PluginError(
            f"{key or kind}={as_typed(name)}: no installed plugin provides it.{near} {self._installed(names)}"
        )

    def label(self, spec: ComponentSpec) -> str:
        """`executor 'slow' of acme 1.2`, as messages call a component."""
        return f"{spec.kind} '{spec.name}' of {spec.dist} {self.versions.get(spec.dist, '')}".rstrip()

    def load_target(self, kind: str, name: str) -> Any:
        """The component itself, imported now.

        PluginError if it is unknown, says that it cannot be used here, or lacks an optional module.
        """
        spec = self.spec(kind, name)
        reason = self.usable(kind, name)
        if reason is not None:
            raise PluginError(f"{kind} '{name}' cannot be used here: {reason}.{self._ways_out(spec)}")
        return self._import(spec, spec.target)

    def load_config_class(self, spec: ComponentSpec) -> type | None:
        """The dataclass of the component's options, None if it has no options."""
        return None if spec.config is None else self._import(spec, spec.config)

    def load_cases(self, spec: ComponentSpec) -> Any:
        """What the component names as the cases of its contract suite, None if it names nothing."""
        return None if spec.cases is None else self._import(spec, spec.cases)

    def build_options(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        """The first argument of the component's constructor: its config dataclass, filled, or an empty mapping.

        ConfigError for options that it does not have, and for those that it misses.
        """
        return build_options(self.load_config_class(self.spec(kind, name)), options, f"{kind}={name}")

    def environment(self, backend: str, *others: tuple[str, str]) -> dict[str, str]:
        """Variables that the backend (a name or `auto`) wants to find when torch is imported, and components (kind,
        name), of which a later one has the last word."""
        chosen = self.auto("backend") if backend == "auto" else self.spec("backend", backend)
        wanted: dict[str, str] = {}
        for spec in (chosen, *(self.spec(kind, name) for kind, name in others)):
            if spec.environment is not None:
                wanted |= self._import(spec, spec.environment)()
        return wanted

    def usable(self, kind: str, name: str) -> str | None:
        """None if the component can be used on this machine, else the reason. A probe runs once in a process."""
        if (kind, name) not in self._probed:
            self._probed[kind, name] = self._probe(self.spec(kind, name))
        return self._probed[kind, name]

    def misfit(self, kind: str, name: str, device: str | None) -> str | None:
        """None if the component serves a backend on this type of device (None: on any), else the reason."""
        provided = self.spec(kind, name).provides
        if device is None or not provided or device in provided:
            return None
        return f"it computes on {' and '.join(provided)}, and the backend on {device}"

    def auto(
        self, kind: str, device: str | None = None, unfit: Callable[[ComponentSpec], str | None] = lambda spec: None
    ) -> ComponentSpec:
        """The usable component of the highest priority, ours before others on a tie; a plugin may pick the backend.

        device  type of the backend's, for components that say which they serve
        unfit   asked of usable ones, the best first: why one cannot be taken nevertheless, None for the one to take
        """
        ranked = sorted(self.specs(kind), key=lambda spec: (-spec.priority, spec.dist != OURS, spec.name))
        reasons = {s.name: self.misfit(kind, s.name, device) or self.usable(kind, s.name) for s in ranked}
        candidates = [name for name, reason in reasons.items() if reason is None]
        while candidates and (reason := unfit(self.spec(kind, candidates[0]))) is not None:
            reasons[candidates.pop(0)] = reason
        if not candidates:
            refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none is installed"
            raise PluginError(f"{kind}=auto: no {kind} can be used here ({refused}). {self._failed()}".rstrip())
        chosen = self._selected(candidates) if kind == "backend" else None
        return self.spec(kind, chosen or candidates[0])

    def provider(self, kind: str, value: str) -> ComponentSpec:
        """The component that serves `value` (an architecture, a file format), the highest priority first."""
        serving = [spec for spec in self.specs(kind) if value in spec.provides]
        if serving:
            return min(serving, key=lambda spec: (-spec.priority, spec.dist != OURS, spec.name))
        known = sorted({served for spec in self.specs(kind) for served in spec.provides} - {ANY})
        raise PluginError(
            f"no installed {kind} plugin supports {value!r}.{did_you_mean(value, known)}"
            f" Supported: {', '.join(known) or 'nothing'}. {self._failed()}".rstrip()
        )

    def hooks(self) -> dict[str, list[str]]:
        """{"distribution:plugin": the hooks it implements beside its announcement} of the plugins that have some."""
        found = {}
        for plugin, module in self._manager.list_name_plugin():
            callers = self._manager.get_hookcallers(module) or ()
            found[plugin] = sorted(caller.name for caller in callers if caller.name != "framework_components")
        return {plugin: names for plugin, names in found.items() if names}

    def _load_plugin(self, ep: EntryPoint) -> None:
        plugin, dist, version = f"{dist_name(ep)}:{ep.name}", dist_name(ep), dist_version(ep)
        try:
            self._manager.register(ep.load(), plugin)
            self._refuse_unknown_hooks(plugin)
            self._announce(ep.name, dist, version, self._announced(plugin))
        except (Exception, SystemExit) as error:
            if self._manager.get_plugin(plugin) is not None:
                self._manager.unregister(name=plugin)
            self._fail(Failure(ep.name, dist, version, _one_line(error)))
            return
        self.versions[dist] = version

    def _announced(self, plugin: str) -> list[ComponentSpec]:
        impls = [impl for impl in _impls(self._manager, "framework_components") if impl.plugin_name == plugin]
        announced: list[Any] = [impl.function() for impl in impls]
        return [spec for specs in announced for spec in specs]

    def _refuse_unknown_hooks(self, plugin: str) -> None:
        known = [name for name in vars(FrameworkHooks) if not name.startswith("_")]
        for caller in self._manager.get_hookcallers(self._manager.get_plugin(plugin)) or ():
            if caller.name not in known:
                raise PluginError(
                    f"implements the hook {caller.name!r}, which is not there.{did_you_mean(caller.name, known)}"
                )

    def _announce(self, plugin: str, dist: str, version: str, specs: Iterable[ComponentSpec]) -> None:
        for spec in specs:
            reason = self._objection(spec)
            if reason is None:
                self._specs[spec.kind, spec.name] = replace(spec, dist=dist)
            else:
                self._fail(Failure(plugin, dist, version, reason, whole=False))

    def _objection(self, spec: ComponentSpec) -> str | None:
        """Why an announced component is left out, None if it is not."""
        if not isinstance(spec, ComponentSpec):
            return f"announces {spec!r}, which is no ComponentSpec"
        wrong = _wrong_field(spec)
        if wrong is not None:
            return wrong
        label = f"{spec.kind}/{spec.name}"
        if spec.kind not in KINDS:
            return f"announces {label}, but there is no kind {spec.kind!r}.{did_you_mean(spec.kind, KINDS)}"
        if spec.api[0] != API_VERSION[0] or spec.api[1] > API_VERSION[1]:
            wanted, have = (".".join(map(str, api)) for api in (spec.api, API_VERSION))
            return f"{label} needs plugin API {wanted}, but this is {have}. Install a release of it made for {have}"
        if spec.kind == "observer" and spec.config is not None:
            return f"{label} announces config={spec.config!r}, but no key sets options of an observer"
        bad = [
            text
            for text in (spec.target, spec.config, spec.probe, spec.environment, spec.cases)
            if text and not _TARGET.fullmatch(text)
        ]
        if bad:
            return f"{label} points at {bad[0]!r}, which does not read 'package.module:attribute'"
        taken = self._specs.get((spec.kind, spec.name))
        return None if taken is None else f"{label} is refused: {taken.dist} announces a component of that name as well"

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        _log.warning("plugin %s It is left out.", _sentence(str(failure)))

    def _probe(self, spec: ComponentSpec) -> str | None:
        if spec.probe is None:
            return None
        try:
            reason = self._import(spec, spec.probe)()
        except Exception as error:  # a probe that breaks is an answer too: not usable, and this is why
            return _one_line(error)
        return None if reason is None else str(reason).rstrip(".")

    def _import(self, spec: ComponentSpec, target: str) -> Any:
        module_name, _, attribute = target.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or "?"
            if missing.partition(".")[0] == module_name.partition(".")[0]:
                raise  # a part of its own is missing: the plugin's bug, whose trace is worth keeping
            hint = f"Install it with: pip install '{spec.dist}[{spec.extra}]'" if spec.extra else "Install that module"
            raise PluginError(f"{self.label(spec)} needs the module {missing!r}. {hint}") from error
        for part in attribute.split("."):
            if not hasattr(value, part):
                raise PluginError(f"{self.label(spec)} points at {target!r}, which is not there")
            value = getattr(value, part)
        return value

    def _selected(self, candidates: list[str]) -> str | None:
        for impl in reversed(_impls(self._manager, "select_backend")):  # pluggy's order: the last registered first
            try:
                chosen = impl.function(*[list(candidates) for _ in impl.argnames])
            except Exception as error:
                _log.warning(
                    "plugin %s raised in select_backend and is not asked: %s", impl.plugin_name, _one_line(error)
                )
                continue
            if chosen is None:
                continue
            if chosen not in candidates:
                raise PluginError(
                    f"backend=auto: plugin {impl.plugin_name} selected {chosen!r}, which cannot be used here."
                    f" Usable: {', '.join(candidates)}. Name one with backend=NAME"
                )
            return str(chosen)
        return None

    def _ways_out(self, spec: ComponentSpec) -> str:
        others = [s.name for s in self.specs(spec.kind) if s.name != spec.name and self.usable(s.kind, s.name) is None]
        auto = f"{spec.kind}=auto to pick one" if spec.kind in ("backend", "attention") and others else ""
        named = " or ".join(f"{spec.kind}={name}" for name in others[:3])
        return f" Use {', or '.join(way for way in (auto, named) if way)}" if others else ""

    def _installed(self, names: list[str]) -> str:
        return f"Installed: {', '.join(names) or 'none'}. {self._failed()}".rstrip()

    def _failed(self) -> str:
        broken = ", ".join(f"{failure.plugin} ({failure.reason})" for failure in self.failures if failure.whole)
        refused = "; ".join(failure.reason for failure in self.failures if not failure.whole)
        sentences = (
            f"Failed to import: {broken}." if broken else "",
            _sentence(f"Left out: {refused}" if refused else ""),
        )
        return " ".join(sentence for sentence in sentences if sentence)


_lock = threading.Lock()
_registry: Registry | None = None


def registry() -> Registry:
    """The registry of this process, loaded at the first call."""
    global _registry
    with _lock:
        if _registry is None:
            _registry = Registry.load()
        return _registry


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_field(spec: ComponentSpec) -> str | None:
    """What is said of the first field that holds no value of its type, None if all are well."""
    provides, api = spec.provides, spec.api
    wanted = {
        **{name: (_is_text(getattr(spec, name)), "a non-empty string") for name in ("kind", "name", "target")},
        **{
            name: (getattr(spec, name) is None or _is_text(getattr(spec, name)), "a non-empty string or None")
            for name in ("config", "extra", "probe", "environment", "cases")
        },
        "priority": (_is_number(spec.priority), "an integer"),
        "provides": (isinstance(provides, tuple) and all(map(_is_text, provides)), "a tuple of strings"),
        "api": (isinstance(api, tuple) and len(api) == 2 and all(map(_is_number, api)), "two integers, such as (1, 0)"),
    }
    for name, (is_right, what) in wanted.items():
        if not is_right:
            return f"announces {spec.kind}/{spec.name} with {name}={getattr(spec, name)!r}, which must be {what}"
    return None


def _impls(manager: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    return list(getattr(manager.hook, hook).get_hookimpls())


def _observer(impl: pluggy.HookImpl, names: tuple[str, ...]) -> _Observer:
    return _Observer(impl.plugin_name, impl.function, tuple(names.index(name) for name in impl.argnames))


def _methods(label: str, observer: Any) -> dict[str, list[_Observer]]:
    """What an object hears: its methods take all of an event's values."""
    heard = {event: getattr(observer, event) for event in EVENTS if hasattr(observer, event)}
    return {event: [_Observer(label, method, tuple(range(len(EVENTS[event]))))] for event, method in heard.items()}


def _check_events(observer: Any) -> None:
    """PluginError for an object that hears nothing, or that has a method for an event which is not there."""
    methods = [name for name in dir(observer) if name.startswith("on_")]
    for name in methods:
        if name not in EVENTS:
            raise PluginError(f"has a method {name!r}, but there is no such event.{did_you_mean(name, EVENTS)}")
        if not callable(getattr(observer, name)):
            raise PluginError(f"has {name}, which is no method")
    if not methods:
        raise PluginError(f"has none of the methods {', '.join(EVENTS)}")


def _sentence(text: str) -> str:
    return text if not text or text.endswith((".", "?")) else f"{text}."


def _one_line(error: BaseException) -> str:
    """The error in one line; its class stands before the text unless the text alone says it."""
    text = in_one_line(str(error)) if isinstance(error, (ModuleNotFoundError, PluginError)) else ""
    return text or class_and_text(error)
