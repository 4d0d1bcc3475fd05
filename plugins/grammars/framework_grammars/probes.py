"""Whether the libraries are installed, found out without importing them: grammar=auto asks in every engine."""

from __future__ import annotations

from importlib.util import find_spec


def xgrammar() -> str | None:
    return _missing("xgrammar")


def llguidance() -> str | None:
    return _missing("llguidance")


def _missing(module: str) -> str | None:
    if find_spec(module) is not None:
        return None
    return f"the module '{module}' is not installed. Install it with: pip install 'framework[grammar]'"
