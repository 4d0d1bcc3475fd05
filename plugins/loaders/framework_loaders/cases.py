"""What `run=check` runs loader `gguf` with: a file of two tensors, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from framework.testing.loaders import LoaderCase
from framework_loaders.gguf import GgufLoader

UINT32, FLOAT32, STRING = 4, 6, 8
ALIGNMENT = 32
HIDDEN, VOCAB = 32, 20
METADATA: Mapping[str, str | int | float] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 1,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.value_length": 16,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write(folder: Path) -> Path:
    """A GGUF file of version 3 with an embedding and a norm. Returns its path."""
    tensors = {"token_embd.weight": np.eye(VOCAB, HIDDEN), "output_norm.weight": np.ones(HIDDEN)}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(METADATA))
    head += b"".join(_text(key) + _value(value) for key, value in METADATA.items())
    data = b""
    for name, array in tensors.items():
        shape = array.shape[::-1]  # the axis that lies closest together comes first
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += _padded(array.astype("<f4").tobytes())
    path = folder / "two.gguf"
    path.write_bytes(_padded(head) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    return struct.pack("<II", UINT32, value) if isinstance(value, int) else struct.pack("<If", FLOAT32, value)


def _padded(some: bytes) -> bytes:
    return some + bytes(-len(some) % ALIGNMENT)


GGUF = LoaderCase(GgufLoader, write, "model.norm.weight", (HIDDEN,))
