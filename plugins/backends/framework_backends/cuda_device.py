"""Whether there is a CUDA device, whether it can be used, and what memory its programs have.

Where a device is visible `backend=auto` takes it. What keeps it from being used is then an error that names the cause,
and never a run on the processor that nobody asked for.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch

_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # dxg: Linux under Windows
_MIN_CAPABILITY = (8, 0)
_INSTALL = "Install it with pip install 'framework[cuda]'"
WHOLE_DEVICE = threading.RLock()
"""Held by whoever records a graph and by whoever waits for the whole device: that is an error while any thread records.
"""


@dataclass(frozen=True)
class ProgramMemory:
    """Shared memory that one program may have: num_bytes of it.

    keeps_read  products read their operands there while they run, not out of registers (compute capability 9, 10, 11),
                so that what is being read stays beside what is on the way
    """

    num_bytes: int
    keeps_read: bool

    @classmethod
    def of(cls, properties: Any) -> ProgramMemory:
        """properties: as of `torch.cuda.get_device_properties`."""
        return cls(properties.shared_memory_per_block_optin, 9 <= properties.major < 12)

    @classmethod
    def current(cls) -> ProgramMemory:
        """Of the current device; without a limit where there is none."""
        import torch

        return cls.of(torch.cuda.get_device_properties()) if torch.cuda.is_available() else cls(1 << 30, True)


def probe() -> str | None:
    """None where a CUDA device is visible, else why none is. Imports no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides every device"
    return None if any(Path(node).exists() for node in _NODES) else "no NVIDIA device is there"


def open_device() -> torch.device:
    """The device. Raises ConfigError with the cause and the way out where it cannot be used."""
    import torch

    reason = probe()
    if reason is not None:
        raise _refusal(reason, "Use a machine with an NVIDIA device")
    if torch.version.cuda is None:
        raise _refusal(f"torch {torch.__version__} is built without CUDA", "Install a CUDA build of torch")
    if find_spec("triton") is None:
        raise _refusal("triton, in which its kernels are written, is not installed", _INSTALL)
    try:
        torch.cuda.init()
        current = torch.cuda.current_device()
    except Exception as error:
        raise _refusal(first_line(error), "Compare the driver (nvidia-smi) with what torch needs") from error
    if current:  # of this thread: in others it is the first one, and kernels run on the current one
        way_out = "Choose a device by CUDA_VISIBLE_DEVICES, and leave torch.cuda.set_device out"
        raise _refusal(f"the current device is cuda:{current}, and only the first one is served", way_out)
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        name, least = torch.cuda.get_device_name(device), ".".join(map(str, _MIN_CAPABILITY))
        way_out = f"Use a device of compute capability {least} or more"
        raise _refusal(f"{name} has compute capability {capability[0]}.{capability[1]}", way_out)
    return device


def _refusal(reason: str, way_out: str) -> ConfigError:
    return ConfigError(f"backend=cuda: {reason}. {way_out}, or say backend=cpu")
