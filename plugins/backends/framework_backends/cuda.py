"""The CUDA backend: steps of decodes as one captured graph, other steps eagerly, and the host two steps ahead.

Products, elementwise operations, the sampler's operations, memory and transfers have modules of their own beside this
one, and the kernels stand in `triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from framework_backends.cuda_device import WHOLE_DEVICE, open_device
from framework_backends.cuda_experts import CudaExpertsPacker
from framework_backends.cuda_graphs import Captured, Graphs
from framework_backends.cuda_layer_ops import CudaLayerOps
from framework_backends.cuda_linear import CudaLinearPacker
from framework_backends.cuda_memory import CudaMemory
from framework_backends.cuda_step_ops import CudaStepOps
from framework_backends.cuda_transfers import Arriving, Slot, Transfers
from framework_backends.dtypes import named_dtype
from framework_backends.moved_blocks import MovesBlocks
from framework_backends.triton.compile_time import CompileTime
from framework_backends.triton.sampler_ops import TritonSamplerOps

_SMALL, _STEP, _MAX_GRAPH_ROWS = (1, 2, 4), 8, 512
"""Rows of the padded steps: a row more costs little where eight share a tile of a product, and much memory is not
spent on batches that nobody runs."""
_BORDERS = (1, 2, 4, 16, 31, 32, 64, 128, 256, _MAX_GRAPH_ROWS, 1024, 2048)
"""Rows up to which products, experts, the sampler and attention take one kernel. One that is not here costs time: what
it parts is compiled where it first runs."""


_PROMPT_STEP = 64
"""Tokens by which the padded steps with prompts grow at least; from 1024 on by an eighth to a sixteenth."""


class CudaBackend(MovesBlocks):
    """`interfaces.Backend` of one CUDA device. Takes no options; CUDA_VISIBLE_DEVICES says which device it is.

    Raises ConfigError, which names the cause, where a device cannot be used, or for a dtype that is not known.
    """

    name = "cuda"
    max_in_flight = 2
    max_num_batched_tokens = 8192

    def __init__(self, options: Mapping[str, Any], ctx: BackendContext) -> None:
        self.device = open_device()
        self.dtype = choose_dtype(ctx.dtype)
        if self.dtype == torch.float32:
            torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.caps = Capabilities(keeps=frozenset({"batch_invariant", "deterministic"}))
        self._compile_time = CompileTime()
        self.step_ops: StepOps = CudaStepOps()
        self.layer_ops: LayerOps = CudaLayerOps()
        self.sampler_ops: SamplerOps = TritonSamplerOps()
        self._packer = CudaLinearPacker(ctx.batch_invariant)
        self._experts_packer = CudaExpertsPacker(ctx.batch_invariant)
        self._memory = CudaMemory(self.device)
        self._transfers = Transfers(self.device)
        self._graphs = Graphs(self.device, self._transfers)
        self._captures = ctx.graphs != "off"

    @property
    def compile_seconds(self) -> float:
        return self._compile_time.seconds

    def explain(self) -> dict[str, tuple[Any, str]]:
        """What `auto` and null mean on this machine."""
        name, most = torch.cuda.get_device_name(self.device), _MAX_GRAPH_ROWS if self._captures else None
        return {
            "engine.dtype": (str(self.dtype).removeprefix("torch."), f"{name} multiplies it natively"),
            "device": (name, "the first of CUDA_VISIBLE_DEVICES"),
            "padded steps": (most, "rows of the largest captured step of decodes" if most else "engine.graphs=off"),
            "kv_cache.num_blocks": (None, "from memory: kv_cache.memory_fraction of the device, 0.9 unless it is set, "
                                          "less weights and what the largest step takes"),
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------ memory

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._packer.pack(weight, bias)

    def pack_experts(self, weights: ExpertWeights, routing: Routing) -> Experts:
        return self._experts_packer.pack(weights, routing)

    def allocate_kv(self, specs: Sequence[KVSpec], num_blocks: int) -> list[Tensor]:
        return self._memory.allocate_kv(specs, num_blocks)

    def profile(self, forward: Callable[[], Any]) -> None:
        """Runs the largest forward pass and remembers what it takes beside the weights."""
        self._memory.profile(forward)

    def kv_bytes_available(self, max_model_len: int, bytes_per_token: int, fraction: float | None) -> int:
        return self._memory.kv_bytes(max_model_len, bytes_per_token, fraction)

    def host_memory(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int64, pin_memory=True)

    # ------------------------------------------------------------------------------------------------- steps

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
        """Decodes of 1, 2, 4 and multiples of 8 rows, and steps with prompts; none with engine.graphs=off."""
        if not self._captures:
            return []
        most = min(max_num_seqs, max_num_batched_tokens, _MAX_GRAPH_ROWS)
        sizes = [*_SMALL, *range(_STEP, most, _STEP), most]
        decodes = [Bucket(n, n, n, 1) for n in sorted({size for size in sizes if size <= most})]
        return decodes + [Bucket(n, most, min(n, most), n) for n in prompt_sizes(max_num_batched_tokens) if n > 1]

    def compile(self, step: Callable[..., Any], bucket: Bucket | None) -> Callable[..., Any]:
        """A captured graph for a bucket. Raises ConfigError for a step that cannot be captured."""
        if bucket is None:
            return step
        size = f"{bucket.requests} rows" if bucket.query_len == 1 else f"{bucket.tokens} tokens"
        return self._graphs.capture(step, f"a step of {size}")

    def telling(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """See `interfaces.CompilesAhead`: those at or below the borders at which another kernel is chosen, and the
        largest."""
        by_tokens = sorted(buckets, key=lambda bucket: bucket.tokens)
        below = [[one for one in by_tokens if one.tokens <= border] for border in _BORDERS]
        return list(dict.fromkeys(found[-1] for found in (*below, by_tokens) if found))

    def compile_ahead(self, steps: Iterable[Callable[[], Any]]) -> None:
        """See `interfaces.CompilesAhead`."""
        self._graphs.compile_ahead(steps)

    def submit(
        self, executable: Callable[..., Any], args: tuple[Any, ...], collect: Callable[[Any], StepOutput]
    ) -> StepFuture:
        """Gives the step to the device, and what takes its value's tensors to the host behind it."""
        try:
            value = executable(*args)
            if isinstance(executable, Captured):
                return _Step(collect, executable.arriving())
            return _Step(collect, self._transfers.copied(value))
        except Exception as error:
            return FailedStep(error, self.device)


class _Step:
    """A step on its way to the host."""

    __slots__ = ("_arriving", "_collect")

    def __init__(self, collect: Callable[[Any], StepOutput], arriving: Arriving | Slot) -> None:
        self._collect, self._arriving = collect, arriving

    def result(self) -> StepOutput:
        return self._collect(self._arriving.wait())

    def done(self) -> bool:
        return self._arriving.done()


class FailedStep:
    """A step that could not be given to the device, or not as a whole. It comes back, as others do, when the device has
    done what it was given: then what it was told from may be written anew."""

    __slots__ = ("_device", "_error")

    def __init__(self, error: Exception, device: torch.device) -> None:
        self._error, self._device = error, device

    def result(self) -> StepOutput:
        with WHOLE_DEVICE, suppress(Exception):  # of the device, which the error at hand may be already
            torch.cuda.synchronize(self._device)
        raise self._error

    def done(self) -> bool:
        return True


def prompt_sizes(most: int) -> list[int]:
    """Tokens of the padded steps with prompts, up to the largest step."""
    sizes, size = [], _PROMPT_STEP
    while size < most:
        sizes.append(size)
        size += max(_PROMPT_STEP, (1 << size.bit_length()) // 16)
    return [*sizes, most]


def choose_dtype(word: str) -> torch.dtype:
    """The dtype of `engine.dtype`; auto is bfloat16, which every device that is opened multiplies natively."""
    return torch.bfloat16 if word == "auto" else named_dtype(word)
