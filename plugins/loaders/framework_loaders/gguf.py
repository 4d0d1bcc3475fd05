"""GGUF files as Hugging Face checkpoints: the header becomes a config.json, names and row orders are translated.

Parsing is `gguf_header`'s, block formats are `gguf_blocks`'. A key, an architecture or a tensor format that is not
known is refused by name. Built by name from `engine.load_format`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from framework.errors import CheckpointError
from framework.interfaces import Checkpoint, WeightSource
from framework_loaders.gguf_blocks import FORMATS, OTHER_FORMATS, dequantize
from framework_loaders.gguf_header import GgufHeader, TensorEntry, read_header
from framework_loaders.source import ShapedSource

NUM_THREADS = 2


@dataclass(frozen=True)
class _Architecture:
    """permuted: rows of q and k are stored with the two halves of a head interleaved."""

    name: str
    permuted: bool = False


_ARCHITECTURES = {"llama": _Architecture("LlamaForCausalLM", permuted=True), "qwen3": _Architecture("Qwen3ForCausalLM")}

# header key without the architecture -> config.json key
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
# Read below, or without effect on the output of a dense decoder.
_KNOWN = {
    *_SIZES, "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
    "expert_used_count", "tensor_data_layout",
}  # fmt: skip

_LAYER_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FACTORS = "rope_freqs.weight"


class GgufLoader:
    """Loader `gguf`."""

    def __init__(self, options: Any, ctx: None = None) -> None:
        assert not options, f"the gguf loader has no options, got {options!r}"

    def checkpoint(self, location: Path) -> Checkpoint:
        """The file's header as a checkpoint. CheckpointError when it is damaged or asks for what is not built."""
        return translate(read_header(location))

    def open(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, seed: int) -> WeightSource:
        """The file's weights under Hugging Face names. `seed` has no use here: nothing is drawn."""
        return GgufSource(read_header(checkpoint.location), checkpoint.config, dtype, device)


def translate(header: GgufHeader) -> Checkpoint:
    """The Checkpoint that a header describes; `tokenizer` holds its `tokenizer.*` keys, None when there are none."""
    config = _config(header)
    vocabulary = {key: value for key, value in header.fields.items() if key.startswith("tokenizer.")}
    return Checkpoint(
        location=header.path,
        format="gguf",
        config=config,
        generation_config={"eos_token_id": config["eos_token_id"]} if "eos_token_id" in config else {},
        tokenizer=vocabulary or None,
    )


def _config(header: GgufHeader) -> dict[str, Any]:
    fields, arch = header.fields, header.fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{header.path}: architecture '{arch}' is not read from GGUF. Read: {known}.")
    own = {key[len(arch) + 1 :]: value for key, value in fields.items() if key.startswith(f"{arch}.")}
    _refuse_keys(header, arch, own)
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[arch].name], "model_type": arch, "hidden_act": "silu"}
    for key, name in _SIZES.items():
        config[name] = _whole(header, f"{arch}.{key}", own.get(key))
    config["num_key_value_heads"] = _uniform(header, f"{arch}.attention.head_count_kv", own, config)
    width = own.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    config["head_dim"] = _whole(header, f"{arch}.attention.key_length", width)
    _refuse_widths(header, arch, own, config["head_dim"])
    config["rms_norm_eps"] = _decimal(header, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    config["rope_parameters"] = _rope(header, arch, own)
    config["vocab_size"] = _embedding(header).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    config.update(_token_ids(fields))
    return config


def _refuse_keys(header: GgufHeader, arch: str, own: Mapping[str, Any]) -> None:
    unknown = sorted(set(own) - _KNOWN)
    if unknown:
        keys = ", ".join(f"{arch}.{key}={own[key]!r:.40}" for key in unknown)
        raise CheckpointError(f"{header.path}: {keys} is not known and may change the output. Use another file.")
    if own.get("expert_count"):
        raise CheckpointError(f"{header.path}: {arch}.expert_count={own['expert_count']}: experts are not built yet.")


def _refuse_widths(header: GgufHeader, arch: str, own: Mapping[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{header.path}: {arch}.{key}={own[key]} differs from head_dim={head_dim}: not built yet."
            )


def _whole(header: GgufHeader, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{header.path}: header key {key} must be a whole number of at least 1, got {value!r}.")
    return value


def _uniform(header: GgufHeader, key: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    value = own.get("attention.head_count_kv", config["num_attention_heads"])
    if isinstance(value, list) and value:
        if len(set(value)) != 1:
            raise CheckpointError(f"{header.path}: {key} differs from layer to layer, which is not built yet.")
        value = value[0]
    return _whole(header, key, value)


def _decimal(header: GgufHeader, key: str, default: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for the 9.999999747e-06 that a file stores."""
    value = header.fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{header.path}: header key {key} must be a number, got {value!r}. Convert it again.")
    return float(str(np.float32(value)))


def _rope(header: GgufHeader, arch: str, own: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _decimal(header, f"{arch}.rope.freq_base", 10000.0)}
    scaling = own.get("rope.scaling.type", "none")
    if _FACTORS in header.tensors:
        rope |= {"rope_type": "factors", "factors": _factors(header)}
    elif scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": _decimal(header, f"{arch}.rope.scaling.factor", 1.0)}
        original = own.get("rope.scaling.original_context_length")
        rope |= {"original_max_position_embeddings": original} if original else {}
    if scaling not in ("none", "linear", "yarn") or (_FACTORS in header.tensors and scaling != "none"):
        raise CheckpointError(
            f"{header.path}: {arch}.rope.scaling.type={scaling!r} is not read here. Use another file."
        )
    return rope


def _factors(header: GgufHeader) -> list[float]:
    entry = header.tensors[_FACTORS]
    if entry.kind != 0:
        raise CheckpointError(f"{header.path}: tensor '{_FACTORS}' must be F32. Convert the file again.")
    _extent(header, entry)
    return np.fromfile(header.path, "<f4", count=int(np.prod(entry.shape)), offset=entry.offset).tolist()


def _embedding(header: GgufHeader) -> TensorEntry:
    entry = header.tensors.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise CheckpointError(f"{header.path}: tensor 'token_embd.weight' is missing or no matrix. Convert it again.")
    return entry


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """bos and eos of the header; a second end, the end of a turn, joins the eos ids."""
    ids: dict[str, Any] = {}
    if "tokenizer.ggml.bos_token_id" in fields:
        ids["bos_token_id"] = fields["tokenizer.ggml.bos_token_id"]
    ends = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    if ends:
        ids["eos_token_id"] = ends[0] if len(set(map(repr, ends))) == 1 else ends
    return ids


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that has none keeps its own, and is reported as unused."""
    if name in _ENDS:
        return _ENDS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_PARTS:
        return name
    return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"


def _extent(header: GgufHeader, entry: TensorEntry) -> tuple[int, int]:
    """First byte and one past the last. CheckpointError for a format that is not read, and for a file cut short."""
    format = FORMATS.get(entry.kind)
    if format is None:
        name = OTHER_FORMATS.get(entry.kind, f"type {entry.kind}")
        known = ", ".join(f.name for f in FORMATS.values())
        raise CheckpointError(f"{header.path}: tensor '{entry.name}' is {name}, which is not read. Read: {known}.")
    if entry.shape and entry.shape[-1] % format.values:
        raise CheckpointError(
            f"{header.path}: tensor '{entry.name}' {list(entry.shape)} has rows that are no multiple of the "
            f"{format.values} values of a {format.name} block. Convert the file again."
        )
    end = entry.offset + format.num_bytes(int(np.prod(entry.shape, dtype=object)))
    if end > header.size:
        raise CheckpointError(
            f"{header.path}: truncated, tensor '{entry.name}' ends at byte {end} but the file has {header.size}. "
            "Download it again."
        )
    return entry.offset, end


class GgufSource(ShapedSource):
    """Tensors of one GGUF file, dequantised when they are taken."""

    def __init__(self, header: GgufHeader, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._extents = {name: _extent(header, entry) for name, entry in header.tensors.items()}
        self._entries = {hugging_face_name(name): entry for name, entry in header.tensors.items() if name != _FACTORS}
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._permuted_heads = heads if _ARCHITECTURES[config["model_type"]].permuted else {}
        # A private writable mapping, because torch warns about read-only memory; nothing writes to it.
        with header.path.open("rb") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gguf")
        super().__init__(header.path, {name: entry.shape for name, entry in self._entries.items()}, dtype, device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entries[name]
        start, end = self._extents[entry.name]
        out = torch.empty(entry.shape, dtype=dtype)
        dequantize(self._bytes[start:end], FORMATS[entry.kind], out, self._pool)
        heads = self._permuted_heads.get(name.split(".")[-2])
        return out if heads is None else _unpermute(out, heads)

    def close(self) -> None:
        self._pool.shutdown()


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): halves that a rotation pairs lie apart again."""
    source = rows.unflatten(0, (heads, -1, 2))
    out = torch.empty_like(rows)
    target = out.unflatten(0, (heads, 2, -1))
    # One copy a half: few enough values at a time that a small model's load wakes no threads (see gguf_blocks).
    for head in range(heads):
        for half in range(2):
            target[head, half].copy_(source[head, :, half])
    return out
