"""Words of a command line that the chosen run does not read: refused by name, since a word that does nothing misleads.

Only what was typed counts: a file may set defaults for several runs. The runs call it before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.runs import RunArgs

OF_BENCH = {"bench": "use run=bench, or leave it out", "server": "use run=serve, or leave it out"}
"""For every run but `bench` and `serve`."""


def refuse_unread(run: str, args: RunArgs, unread: Mapping[str, str]) -> None:
    """ConfigError for a typed word whose key is one of `unread` ({key: way out}) or is below one."""
    for key, word in args.typed.items():
        for name, way_out in unread.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(f"{word} means nothing to run={run}; {way_out}")


def refuse_texts(run: str, args: RunArgs, way_out: Mapping[str, str]) -> None:
    """ConfigError for a text of the command line that is one of `way_out` ({key: what to do instead})."""
    for key, instead in way_out.items():
        value = getattr(args, key)
        if value is not None:
            raise ConfigError(f"{key}={value} means nothing to run={run}; {instead}")
