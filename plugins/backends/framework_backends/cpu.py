"""The CPU backend: eager steps of exact shapes in the calling thread, oneDNN products, KV in ordinary host memory.

Products, elementwise operations, memory and the step's array functions have modules of their own beside this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.batch import StepOutput
from framework.interfaces import (
    BackendContext,
    Bucket,
    Capabilities,
    Experts,
    ExpertWeights,
    KVSpec,
    LayerOps,
    Linear,
    Routing,
    SamplerOps,
    StepFuture,
    StepOps,
)
from framework_backends.cpu_experts import CpuExperts
from framework_backends.cpu_layer_ops import CpuLayerOps, InvariantLayerOps
from framework_backends.cpu_linear import LinearPacker
from framework_backends.cpu_memory import free_bytes, keep_freed_memory, kv_bytes, lazy_zeros, prefer_huge_pages
from framework_backends.cpu_sampler_ops import CpuSamplerOps
from framework_backends.cpu_step_ops import CpuStepOps
from framework_backends.dtypes import named_dtype
from framework_backends.moved_blocks import MovesBlocks

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


class CpuBackend(MovesBlocks):
    """`interfaces.Backend` of the host. Takes no options; threads are those of torch (see `cpu_environment`)."""

    name = "cpu"
    max_in_flight = 1
    max_num_batched_tokens = 2048
    compile_seconds = 0.0

    def __init__(self, options: Mapping[str, Any], ctx: BackendContext) -> None:
        """Raises ConfigError for a dtype that is not one of auto, float32, bfloat16, float16."""
        self.device = torch.device("cpu")
        self.dtype = choose_dtype(ctx.dtype)
        self.caps = Capabilities(keeps=frozenset({"batch_invariant", "deterministic"}))
        self.step_ops: StepOps = CpuStepOps()
        self.sampler_ops: SamplerOps = CpuSamplerOps()
        self.layer_ops: LayerOps = InvariantLayerOps() if ctx.batch_invariant else CpuLayerOps()
        self._packer = LinearPacker(ctx.batch_invariant)
        if keep_freed_memory():
            prefer_huge_pages()

    def explain(self) -> dict[str, tuple[Any, str]]:
        """What `auto` and null mean on this machine."""
        flags = " or ".join(sorted(_BFLOAT16_FLAGS))
        has = "has" if _multiplies_bfloat16(Path("/proc/cpuinfo")) else "has not"
        wish = os.environ.get("OMP_NUM_THREADS")
        why_threads = f"OMP_NUM_THREADS={wish} when torch was imported" if wish else "torch's own choice"
        return {
            "engine.dtype": (str(self.dtype).removeprefix("torch."), f"the CPU {has} {flags}"),
            "threads": (torch.get_num_threads(), why_threads),
            "kv_cache.num_blocks": (None, "from memory: the smaller of 4 x max_model_len tokens and a tenth of what is "
                                          "free, or kv_cache.memory_fraction of it"),
        }  # fmt: skip

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._packer.pack(weight, bias)

    def pack_experts(self, weights: ExpertWeights, routing: Routing) -> Experts:
        return CpuExperts(weights, routing, self._packer.pack, self.layer_ops.silu_and_mul)

    def allocate_kv(self, specs: Sequence[KVSpec], num_blocks: int) -> list[Tensor]:
        """Zeroed tensors; a block that was never written costs no resident memory."""
        return [lazy_zeros([num_blocks if n == -1 else n for n in spec.shape], spec.dtype) for spec in specs]

    def profile(self, forward: Callable[[], Any]) -> None:
        """Memory that a step takes is given back behind it."""

    def kv_bytes_available(self, max_model_len: int, bytes_per_token: int, fraction: float | None) -> int:
        return kv_bytes(max_model_len, bytes_per_token, fraction, free_bytes())

    def host_memory(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int64)

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
        """None: steps run with exact shapes."""
        return []

    def compile(self, step: Callable[..., Any], bucket: Bucket | None) -> Callable[..., Any]:
        """The step itself: `engine.graphs` has nothing to capture here, whatever its value."""
        return step

    def submit(
        self, executable: Callable[..., Any], args: tuple[Any, ...], collect: Callable[[Any], StepOutput]
    ) -> StepFuture:
        """Runs the step before it returns; `result` raises what the step raised."""
        try:
            return _DoneStep(collect, executable(*args), None)
        except Exception as error:
            return _DoneStep(collect, None, error)


class _DoneStep:
    """A step that has run, and what came of it."""

    __slots__ = ("_collect", "_error", "_value")

    def __init__(self, collect: Callable[[Any], StepOutput], value: Any, error: Exception | None) -> None:
        self._collect, self._value, self._error = collect, value, error

    def result(self) -> StepOutput:
        if self._error is not None:
            raise self._error
        return self._collect(self._value)

    def done(self) -> bool:
        return True


def choose_dtype(word: str) -> torch.dtype:
    """The dtype of `engine.dtype`; auto is bfloat16 where the CPU multiplies it natively, else float32."""
    if word == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(Path("/proc/cpuinfo")) else torch.float32
    return named_dtype(word)


def _multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Whether the first processor lists AVX512-BF16 or AMX-BF16. False where the file does not exist."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return bool(_BFLOAT16_FLAGS & set(flags.split()))
