"""How an attention plugin of this package gets the library whose kernels it calls, and why it cannot.

Called when a component is built: its probe has found the module before, without importing it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from framework.errors import PluginError


def library(module: str, attention: str) -> Any:
    """The imported module. PluginError with the reason where it does not load: built for another torch, mostly."""
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        raise PluginError(
            f"attention={attention}: the module '{module}' is installed and does not load ({error}). "
            f"Install a build of it for this torch, or use attention=auto"
        ) from error
