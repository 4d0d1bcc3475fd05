"""The command line: `python -m framework` and the script `framework`.

Prints help without importing Hydra, rewrites the typed words, lets Hydra compose (and sweep), then calls the chosen
run. A user's error is one line on stderr and exit code 2. Nothing else in the package calls this module.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from framework.ending import end_at_once, interrupt
from framework.errors import ConfigError, FrameworkError, did_you_mean, no_such_choice

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from framework.config import ComponentConfig, Config
    from framework.runs import RunArgs
    from framework.runs.engines import KeptWeights

FLAGS_WITH_VALUE = {
    "--cfg": "-c", "--package": "-p", "--config-name": "-cn", "--config-dir": "-cd",
}  # fmt: skip
FLAGS_ALONE = {
    "--help": "-h", "--version": "", "--multirun": "-m", "--run": "-r", "--resolve": "", "--hydra-help": "",
    "--shell-completion": "-sc",
}  # fmt: skip
MODES = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")
CFG_PARTS = ("job", "hydra", "all")
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
TRACE_SWITCH = "HYDRA_FULL_ERROR"
READ_TRACES = ("replay", "timeline")
"""Runs for which `trace=` names a file that is there: jobs of a sweep share it."""
BROKEN_PIPE_EXIT = 141  # what a shell shows for a program that SIGPIPE ended
WANTED_TRACE = "FRAMEWORK_FULL_ERROR_AS_TYPED"
"""Carries the typed value of the switch to the jobs of a launcher that runs them in processes of their own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command line. Ends with SystemExit: 2 for a user's error, 1 when a part was refused or a job of a sweep
    failed, 130 for Ctrl-C, 143 for SIGTERM, 141 when nobody reads the output any more."""
    wants_trace = os.environ.get(TRACE_SWITCH) == "1"
    _escape_what_stdout_cannot_show()
    before = signal.getsignal(signal.SIGTERM)
    if before is not end_at_once:  # a program of our own ends by itself, save where a run holds its signals
        signal.signal(signal.SIGTERM, interrupt)  # first of all: the imports below take a while
    try:
        typed = list(sys.argv[1:] if argv is None else argv)
        flags, words = split_flags(typed)
        if "--help" in flags:
            print_help(flags)
        elif "--version" in flags:
            print_version()
        else:
            _run_hydra(flags, words, typed)
        sys.stdout.flush()
    except FrameworkError as error:
        _give_up(error, wants_trace)
    except BrokenPipeError:
        _end_unread()
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + (error.args[0] if error.args else signal.SIGINT)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def split_flags(argv: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """({long flag: value or None}, words): flags may stand anywhere. ConfigError for one that does not exist."""
    short = {alias: flag for flag, alias in {**FLAGS_WITH_VALUE, **FLAGS_ALONE, "--info": "-i"}.items() if alias}
    flags: dict[str, str | None] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = short.get(name, name)
        if flag == "--info":
            flags[flag] = value if equals else rest.pop(0) if rest and rest[0] in INFO_TOPICS else "all"
        elif flag in FLAGS_ALONE:
            flags[flag] = None
        elif flag not in FLAGS_WITH_VALUE:
            known = [*FLAGS_WITH_VALUE, *FLAGS_ALONE]  # --info speaks of Hydra alone
            near = did_you_mean(name.lstrip("-"), [flag.lstrip("-") for flag in known]).replace("'", "'--", 1)
            raise ConfigError(f"{name}: there is no such flag.{near} Flags: {', '.join(known)}")
        elif equals or rest:
            flags[flag] = value if equals else rest.pop(0)
        else:
            raise ConfigError(f"{name} needs a value")
    for flag, choices in (("--cfg", CFG_PARTS), ("--info", INFO_TOPICS)):
        if flags.get(flag, choices[0]) not in choices:
            raise no_such_choice(flag, flags[flag], choices)
    modes = [flag for flag in MODES if flag in flags]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other. Leave one out")
    if "--resolve" in flags and "--cfg" not in flags:
        raise ConfigError("--resolve belongs to --cfg. Add --cfg job")
    return flags, words


def print_help(flags: Mapping[str, str | None]) -> None:
    from framework.discovery import search_roots
    from framework.helptext import help_text
    from framework.words import Vocabulary

    roots = search_roots(flags.get("--config-dir"))
    print(help_text(roots, Vocabulary.read(roots, flags.get("--config-name") or "config")))


def print_version() -> None:
    from framework import API_VERSION, __version__

    print(f"framework {__version__} (plugin API {'.'.join(map(str, API_VERSION))})")


def _run_hydra(flags: dict[str, str | None], words: list[str], typed: Sequence[str]) -> None:
    """Composes and runs through Hydra's own main, so that --multirun, launchers, --cfg and completion are Hydra's.

    typed  the whole command line, which a sweep keeps to be resumed
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from framework import composing
    from framework.sweep.callback import SweepFiles
    from framework.sweep.job import forget_weights
    from framework.sweep.repetition import spread_repetitions
    from framework.words import Vocabulary, command_words

    SweepFiles.argv, SweepFiles.num_failed = typed, 0
    primary = flags.setdefault("--config-name", "config") or "config"
    roots = composing.search_roots(flags.get("--config-dir"))
    if "--shell-completion" not in flags:
        words = command_words(words, Vocabulary.read(roots, primary))
    if "--multirun" in flags:
        words = spread_repetitions(words)
    if "--cfg" in flags:
        composing.parts_of(composing.load(words, roots, primary))  # Hydra prints whatever composes: check it first
    _register_search_path()
    app = hydra.main(version_base="1.3", config_path=str(roots[0][1]), config_name=primary)(_app)
    before = os.environ.get(TRACE_SWITCH), sys.argv
    os.environ[TRACE_SWITCH] = "1"  # what Hydra refuses must reach us as an exception, not as a page of its own
    os.environ[WANTED_TRACE] = before[0] or ""
    sys.argv = [sys.argv[0], *_spelled(flags), *words]
    try:
        app()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(composing.one_line(error)) from error
    finally:
        forget_weights()
        _restore_trace_switch()
        sys.argv = before[1]
    if SweepFiles.num_failed:
        raise SystemExit(1)


def _app(cfg: DictConfig) -> float | None:
    """One job: Hydra calls it once, or once a combination under --multirun, where it returns the sweep's objective."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from framework.plugins import registry
    from framework.runs import Incomplete

    wants_trace = _restore_trace_switch()
    try:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return _job(cfg, wants_trace)
        config, run, args = _parts(cfg)
        if args.sweep.objective is not None:
            raise ConfigError(f"sweep.objective={args.sweep.objective} means nothing without --multirun. Leave it out")
        registry().load_target("run", run.name)(config, args)
    except FrameworkError as error:
        _give_up(error, wants_trace)
    except Incomplete as part:
        print(f"error: {part}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # Hydra would show its trace
        _end_unread()
    return None


def _job(cfg: DictConfig, wants_trace: bool) -> float | None:
    """One job of a sweep: what goes wrong stands in its result, and the sweep goes on."""
    from hydra.core.hydra_config import HydraConfig

    from framework.plugins import registry
    from framework.sweep.callback import place_of
    from framework.sweep.job import run_job

    place, objective = place_of(HydraConfig.get()), cfg.sweep.objective

    def work(kept: KeptWeights) -> Mapping[str, float] | None:
        config, run, args = _parts(cfg)
        config, args = _with_own_files(config, replace(args, kept=kept), reads_trace=run.name in READ_TRACES)
        metrics: Mapping[str, float] | None = registry().load_target("run", run.name)(config, args)
        if objective is not None and objective not in (metrics or {}):
            raise no_such_choice("sweep.objective", objective, metrics or ())
        return metrics

    found: float | None = run_job(place, work, keep=cfg.sweep.keep_weights, wants_trace=wants_trace).get(objective)
    return found


def _parts(cfg: DictConfig) -> tuple[Config, ComponentConfig, RunArgs]:
    """What a run is called with, and the environment as its backend wants it."""
    from framework.composing import parts_of
    from framework.sweep.repetition import with_seeds_of

    config, run, args = parts_of(cfg)
    config, args = with_seeds_of(args.sweep.repetition, config, args)
    chosen = [("run", run.name), *([("bench", args.bench.name)] if run.name == "bench" else [])]
    prepare_environment(config.backend.name, chosen)
    return config, run, _with_command(cfg, args)


def _with_command(cfg: DictConfig, args: RunArgs) -> RunArgs:
    """What was typed, and how to find out who set what: reports want the one, `run=explain` the other."""
    from hydra.core.hydra_config import HydraConfig

    from framework.discovery import OURS
    from framework.origins import settings_of

    job = HydraConfig.get()
    names = {"main": OURS, "command-line": "--config-dir"}
    files = [
        (names.get(s.provider, s.provider), Path(s.path)) for s in job.runtime.config_sources if s.schema == "file"
    ]
    words, primary = list(job.overrides.task), job.job.config_name or "config"
    typed = [_as_typed(word.lstrip("+"), cfg) for word in words]
    command = shlex.join(["python", "-m", "framework", *typed])
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    return replace(
        args,
        command=command,
        typed=dict(zip(keys, typed, strict=True)),
        settings=lambda: settings_of(cfg, words, files, primary),
    )


def _as_typed(word: str, cfg: DictConfig) -> str:
    """A word of Hydra's as it is typed: texts without the quotes that were put around them, secrets left out."""
    from framework.secret_words import may_hold_secret
    from framework.words import TEXT_KEYS

    key = word.partition("=")[0]
    if key in TEXT_KEYS:
        return f"{key}={cfg[key]}"
    return f"{key}=[...]" if may_hold_secret(word) else word


def prepare_environment(backend: str, chosen: Sequence[tuple[str, str]]) -> None:
    """Sets what the backend and other components want to find in the environment when torch is imported.

    What the user has set stays. A process of our own may bind its threads to cores; one that only uses the library is
    left as it is.
    """
    from framework.plugins import registry

    if "torch" not in sys.modules:
        for name, value in registry().environment(backend, *chosen).items():
            os.environ.setdefault(name, value)


def _with_own_files(config: Config, args: RunArgs, *, reads_trace: bool) -> tuple[Config, RunArgs]:
    """Files of a job of a sweep lie in the job's folder: else every job would overwrite those of the one before it."""
    from hydra.core.hydra_config import HydraConfig

    folder = Path(HydraConfig.get().runtime.output_dir)

    def own(key: str, name: str | None) -> str | None:
        if not name:
            return name
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{key}={name}: a job of a sweep writes into its own folder. Use {key}=NAME")
        return str(path)

    named = {key: own(f"run.{key}", args.options[key]) for key in ("plot", "profile") if key in args.options}
    args = replace(args, output=own("output", args.output), options={**args.options, **named})
    return config if reads_trace else replace(config, trace=own("trace", config.trace)), args


def _register_search_path() -> None:
    """Shows Hydra the plugins' folders, in this process alone."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from framework.discovery import conf_roots

    class PluginFolders(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for dist, folder in conf_roots()[1:]:
                search_path.append(provider=dist, path=f"file://{folder}")

    Plugins.instance().register(PluginFolders)


def _spelled(flags: Mapping[str, str | None]) -> list[str]:
    return [part for flag, value in flags.items() for part in (flag, value) if part is not None]


def _restore_trace_switch() -> bool:
    """Gives Hydra's switch its typed value back: a crash of a run is shown as Hydra shows it. True if it is on."""
    typed = os.environ.pop(WANTED_TRACE, None)
    if typed is not None:
        os.environ[TRACE_SWITCH] = typed
    return os.environ.get(TRACE_SWITCH) == "1"


def _escape_what_stdout_cannot_show() -> None:
    """Where the locale or PYTHONIOENCODING gives stdout a small alphabet, other characters appear as \\uXXXX."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _end_unread() -> NoReturn:
    """Ends quietly when the reader of stdout has gone, as in `| head`; what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(BROKEN_PIPE_EXIT) from None


def _give_up(error: FrameworkError, wants_trace: bool) -> NoReturn:
    if wants_trace:
        traceback.print_exception(error, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2) from None
