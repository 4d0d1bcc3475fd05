"""`python -m framework.sweep DIR`: table and picture of a sweep again; with `--resume`, its missing jobs first."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from framework.errors import ConfigError, FrameworkError
from framework.sweep.files import read_json
from framework.sweep.lock import LOCK
from framework.sweep.report import write_results

USAGE = "usage: python -m framework.sweep [--resume] DIR (the folder of a sweep)"


def main(argv: Sequence[str]) -> None:
    """Ends as the sweep did, with SystemExit 1 when jobs failed; 2 and one line when there is no such sweep."""
    folders = [word for word in argv if word != "--resume"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    folder = Path(folders[0])
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder. Name the folder of a sweep")
        if "--resume" in argv:
            resume(folder)
        num_failed = write_results(folder)
    except FrameworkError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if num_failed:
        raise SystemExit(1)


def resume(folder: Path) -> None:
    """Turns this process into the sweep's command line, in the folder where it was typed. ConfigError when its lock is
    not there, or that folder is not."""
    if not (folder / LOCK).exists():
        raise ConfigError(f"{folder}: there is no {LOCK}, so nothing says what to resume. Type the sweep again")
    lock = read_json(folder / LOCK)
    if not Path(lock["folder"]).is_dir():
        raise ConfigError(f"{folder / LOCK}: {lock['folder']}, where the sweep was typed, is not there. Type it again")
    words = [word for word in lock["argv"] if not word.lstrip("+").startswith("hydra.sweep.dir=")]
    here = folder.resolve()
    os.chdir(lock["folder"])
    os.execv(sys.executable, [sys.executable, "-m", "framework", *words, f"hydra.sweep.dir={here}"])


if __name__ == "__main__":
    main(sys.argv[1:])
