"""What Hydra calls in the parent process of a sweep: the lock before the first job, table and picture after the last.

Named in `conf/config.yaml`. With `place_of`, which tells a job where it stands, the only file of the sweep that knows
Hydra.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from framework.errors import FrameworkError
from framework.secret_words import may_hold_secret
from framework.sweep.files import read_json
from framework.sweep.job import Place
from framework.sweep.lock import LOCK, Size, write_lock
from framework.sweep.repetition import NUMBER
from framework.sweep.report import write_results

GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Hydra's own sweeper, which runs all combinations."""

NOT_LOCKED = ("hydra", "server")
"""Nodes that the lock leaves out: of the sweep itself, and of the server's, which may hold keys of its clients."""


class SweepFiles(Callback):
    """Hydra's callback of `--multirun`.

    argv        the typed command line, set by whoever runs one
    num_failed  jobs of the last sweep of this process that failed: what the exit code follows from
    """

    argv: ClassVar[Sequence[str]] = ()
    num_failed: ClassVar[int] = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the program with a user's error when the sweep cannot begin here: Hydra would only log an exception."""
        words = [str(word).lstrip("+") for word in config.hydra.overrides.task]
        try:
            size = size_of(list(config.hydra.overrides.task), config.hydra.sweeper)
            _refuse_secrets(words, config)
            write_lock(Path(config.hydra.sweep.dir), self.argv, words, _locked(config), size)
        except FrameworkError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the program with the fault that keeps table or picture from being made: Hydra would only warn of it."""
        try:
            SweepFiles.num_failed = write_results(Path(config.hydra.sweep.dir))
        except FrameworkError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except Exception as error:
            traceback.print_exception(error)
            raise SystemExit(1) from None


def _refuse_secrets(words: Sequence[str], config: DictConfig) -> None:
    """FrameworkError for keys of clients: the lock, the results and Hydra's own file would hold them."""
    if config.server.api_keys or any(word.startswith("server") and may_hold_secret(word) for word in words):
        raise FrameworkError(
            "server.api_keys would stand in the files of the sweep. Use server.api_keys_file=FILE, or leave it out"
        )


def _locked(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict), "a composed configuration is a mapping"
    return {str(key): value for key, value in plain.items() if key not in NOT_LOCKED}


def size_of(words: list[str], sweeper: DictConfig) -> Size:
    """What varies, and how many jobs that makes. FrameworkError for repetitions that the sweeper would search in."""
    sweeps = [one for one in OverridesParser.create().parse_overrides(words) if one.is_sweep_override()]
    varied = [str(one.key_or_group) for one in sweeps]
    if sweeper._target_ != GRID:
        if NUMBER in varied:
            raise FrameworkError(
                "sweep.repetitions is for sweeps over all combinations: hydra/sweeper=basic. Leave it out"
            )
        return Size((), None)
    if sweeper.params or any(isinstance(one.value(), Glob) for one in sweeps):
        return Size((), None)
    num_jobs = 1
    for one in sweeps:
        num_jobs *= sum(1 for _ in one.sweep_string_iterator())
    return Size(varied, num_jobs)


def place_of(hydra: HydraConf) -> Place:
    """Where the job stands that Hydra runs now. hydra: the node of that name."""
    lock, number = read_json(Path(hydra.sweep.dir) / LOCK), hydra.job.num
    assert number is not None, "Hydra numbers the jobs of a sweep"
    return Place(
        folder=Path(hydra.runtime.output_dir),
        number=number,
        overrides=[str(word).lstrip("+") for word in hydra.overrides.task],
        num_jobs=lock["num_jobs"],
        varied=lock["varied"],
        start=len(lock["starts"]) - 1,
    )
