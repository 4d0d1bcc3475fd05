"""The line that a person reads while a model loads; nothing where stderr is no terminal. Runs call it first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.config import Config


def announce(config: Config) -> None:
    """Says on stderr what is being loaded."""
    if sys.stderr.isatty():
        print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
