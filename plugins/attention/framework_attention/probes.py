"""Whether a plugin of this package could run here, found out without importing what it needs: `attention=auto` asks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

_NODES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""One of them is there where the system sees an NVIDIA device: Linux, its Windows subsystem, some containers."""


def triton() -> str | None:
    """None where triton is installed and a CUDA device is visible, else what is missing."""
    return _missing("triton", "framework[cuda]") or _no_device()


def flash_attn() -> str | None:
    """As `triton`, for flash-attn: building it takes the torch that is there, not one of its own."""
    return _missing("flash_attn", "framework[flash-attn]", " --no-build-isolation") or _no_device()


def flashinfer() -> str | None:
    """As `triton`, for flashinfer-python."""
    return _missing("flashinfer", "framework[flashinfer]") or _no_device()


def _missing(module: str, package: str, words: str = "") -> str | None:
    if find_spec(module) is not None:
        return None
    return f"the module '{module}' is not installed. Install it with: pip install '{package}'{words}"


def _no_device() -> str | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every device"
    return None if any(Path(node).exists() for node in _NODES) else "no NVIDIA device is there"
