"""Whether a plugin of this package could run here, found out without importing what it needs: `attention=auto` asks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

_NODES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""One of them is there where the system sees an NVIDIA device: Linux, its Windows subsystem, some containers."""


def triton() -> str | None:
    """None where triton is installed and a CUDA device is visible, else what is missing."""
    if find_spec("triton") is None:
        return "the module 'triton' is not installed. Install it with: pip install 'framework[cuda]'"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every device"
    return None if any(Path(node).exists() for node in _NODES) else "no NVIDIA device is there"
