"""Whether a model plugin can be used on this machine, without importing what it needs. Called by the registry."""

from __future__ import annotations

from importlib import metadata, util


def transformers() -> str | None:
    """None where transformers 5 is installed, else the reason."""
    if util.find_spec("transformers") is None:
        return "the module 'transformers' is not installed. Install it with: pip install 'framework[transformers]'"
    version = metadata.version("transformers")
    return None if version.partition(".")[0] == "5" else f"it needs transformers 5, and {version} is installed"
