"""Every contract of the engine on one page: what a plugin of each kind must do, and what it may rely on.

Nothing is implemented here. Tensors are torch tensors on the backend's device; names of indices and shapes are those of
`framework.batch`. A component is built as `Target(options, ctx)`: its own checked options (a config dataclass instance,
or an empty mapping when it declares none) and the context of its kind. Importing a plugin file must be cheap and safe
on every machine: devices and optional libraries are touched in `__init__`, not at import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from framework.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Field, InputBatch, NewRequest, Rows, SchedulerOutput, StepOutput
    from framework.request import NewTokens, Request, SamplingParams

# ---------------------------------------------------------------------------------------------- capabilities


@dataclass(frozen=True)
class Capabilities:
    """What a component needs from the others and what it keeps true; the composition is solved before weights load.

    Words in use: host_tokens (needs committed token values on the host), exact_lens, async, drafts, graph_safe,
    batch_invariant, deterministic, argmax (never changes the best token), kept_set (never admits a masked token).
    """

    needs: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()


@runtime_checkable
class Explains(Protocol):
    """Of any component that decides something by itself; a component need not have it."""

    def explain(self) -> Mapping[str, tuple[Any, str]]:
        """{key of the configuration, or name of what was decided: (value or None, why)}, for `run=explain`."""


# ------------------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True)
class KVGroup:
    """One kind of KV memory: its layers share a block list a request.

    kind: full, sliding, latent. window: readable positions including the current one, None for all.
    """

    name: str
    kind: Literal["full", "sliding", "latent"] = "full"
    block_size: int = 16
    window: int | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerContext:
    """Limits a scheduler works under. num_blocks includes null block 0; rows are 1 .. max_num_seqs (row 0 is null)."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    prefix_caching: bool
    policy: Policy
    connector: KVConnector
    max_in_flight: int = 1
    num_lookahead: int = 0
    num_swap_blocks: int = 0  # in host memory, for preempted requests; 0 when preemption recomputes


@runtime_checkable
class Scheduler(Protocol):
    """Decides how many tokens of which request each step computes, and owns every `Request` and block.

    There is no prefill phase: a prompt chunk, a decode, a resumed span and a draft check are one case. Knows no tensor.
    One whose class declares `caps` that keep `grammars` serves requests with a `constraint`: it admits them once that
    is ready, gives each of their logits rows a mask (`scheduler.constrained`), does not schedule them ahead of an
    unknown token, and tells the constraint what was drawn. Of any other scheduler such requests are refused.
    """

    def check_request(self, request: Request) -> None:
        """Raises RequestError for what could never run here, as when the pool alone cannot hold it; changes nothing."""

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises what `check_request` raises; nothing is queued then."""

    def abort(self, request_id: str) -> Request | None:
        """Ends a waiting or running request with finish_reason `abort`; None when the id is not known."""

    def restart(self) -> None:
        """Every running request waits and is computed anew: the steps in flight are lost, and come back as such."""

    def stop(self, request_id: str, stop_string: str) -> Request | None:
        """Like `abort`, with finish_reason `stop` and this stop_reason: the text holds a stop string."""

    def schedule(self) -> SchedulerOutput:
        """The next step. May be called again before `update` of the steps in flight (up to max_in_flight)."""

    def update(self, scheduled: SchedulerOutput, output: StepOutput) -> Sequence[NewTokens]:
        """Commits a step's tokens, publishes computed blocks, ends requests. Steps come back in order.

        A list, or `request.OneEach` where every row got one token and goes on: then nothing is done a request.
        """

    def has_work(self) -> bool: ...

    def stats(self) -> Mapping[str, int | float]:
        """num_waiting, num_running, num_free_blocks, num_blocks, num_preemptions, prefix_hit_tokens,
        prefix_query_tokens."""


@runtime_checkable
class Policy(Protocol):
    """Who goes first and who yields, inside the default scheduler. Holds no blocks, changes no request."""

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Waiting requests, the next to admit first. Must be a permutation of `waiting`."""

    def admit(self, request: Request, budget: int) -> bool:
        """Whether to admit `request` now, with `budget` tokens left; False stops admission for this step.

        A False does not count while no request runs: no later step could change the answer.
        """

    def victim(self, running: Sequence[Request]) -> Request:
        """The running request that is preempted when blocks run out."""


# ---------------------------------------------------------------------------------------- backend and layers


class Linear(Protocol):
    """A packed dense product: [T, in] -> [T, out] in the model's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class Gates(Protocol):
    """Of a `Linear` that takes the gate behind it into its launch; a backend's products need not have it."""

    def gated(self, x: Tensor) -> Tensor:
        """silu_and_mul of the product, as `framework.layers.ops` has it: [T, in] -> [T, out / 2]."""


@runtime_checkable
class FusesNorm(Protocol):
    """Of a `Linear` that takes its neighbours into its launch; a backend's products need not have it.

    Both return the product and the residual stream x + residual, [T, in] in x's dtype; residual None: x is the stream.
    The result is that of `framework.layers.ops` up to rounding, for any T; x and residual keep their values.
    """

    def after_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(product of rms_norm(x + residual, weight, eps), x + residual)."""

    def gated_after_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(silu_and_mul of that product: [T, out / 2], x + residual)."""


@runtime_checkable
class Widens(Protocol):
    """Of a `Linear` of a float32 weight that takes rows of 16 bits as they are; a backend's products need not have
    it."""

    def widened(self, x: Tensor) -> Tensor:
        """[T, out] float32: the product of x.float(), [T, in], up to the order of its sums; x in any dtype."""


class LayerOps(Protocol):
    """Elementwise operations of a layer that a backend may fuse; the torch reference is `framework.layers.ops`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A weight of x's dtype, or a float32 one, with which the product is rounded once."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); may reuse the memory of both arguments."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(first half) * second half."""

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: gelu_tanh(first half) * second half."""

    def gelu_tanh(self, x: Tensor) -> Tensor: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of logits [L, V]; may reuse the memory of x."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, half-split pairs. x [T, H, D] -> the same shape; cos, sin [T, 1, D] float32.

        cos stands twice and the first half of sin is negated: x * cos + (x with its halves swapped) * sin.
        """


class StepOps(Protocol):
    """The step's array functions; the torch reference and the exact meaning are in `framework.step_ops`.

    receive(told, ring, turn, num_rows)  optional: the beginning of padded steps, which reads host memory on the device
    prepare_ragged(buffers, table, num_rows, num_tokens, num_logits)  needed of a backend whose buckets hold prompts
    """

    def apply_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None: ...
    def apply_spans(self, flat: Tensor, starts: Sequence[int], counts: Sequence[int], values: Tensor) -> None: ...
    def prepare(
        self, buffers: Any, table: Any, num_rows: int, num_tokens: int, num_logits: int, goes_on: bool
    ) -> None: ...
    def prepare_decodes(self, buffers: Any, table: Any, num_rows: int) -> None: ...
    def post_update(self, buffers: Any, table: Any, num_rows: int, num_logits: int, sampled: Tensor) -> None: ...


@dataclass(frozen=True)
class Bucket:
    """A padded step shape that a backend compiles or captures once.

    query_len  1 for steps of decodes, and the most tokens of a row for steps with prompts, of which the forward pass
               alone is compiled
    """

    tokens: int
    requests: int
    logits_rows: int
    query_len: int
    variant: str = "plain"


@dataclass(frozen=True)
class KVSpec:
    """Memory one attention layer needs: attention declares the layout, the backend allocates.

    shape  of one layer's tensor with -1 where num_blocks stands, e.g. (2, kv_heads, -1, block_size, head_dim)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_bytes: int


@dataclass(frozen=True)
class LayerSpec:
    """An attention layer as the model declares it.

    window     readable positions, the query's own included; None for all
    softcap    c: scores s become c * tanh(s / c) before the softmax
    sinks      [num_heads] in the model's dtype: a logit a head that joins the softmax and has no value
    value_dim  of a latent layer: what is kept of a token is one key of head_dim, whose first value_dim are its value
    """

    index: int
    group: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    value_dim: int | None = None

    @property
    def kind(self) -> Literal["full", "sliding", "latent"]:
        """Of the KV group that it belongs to."""
        if self.value_dim is not None:
            return "latent"
        return "full" if self.window is None else "sliding"


@dataclass(frozen=True)
class Routing:
    """How a token's router logits [E] become its k experts and their weights; all of it counts in float32.

    scores       "softmax" or "sigmoid" of all logits, or "selected": softmax of the k that are chosen by their logits
    normalizes   the k weights are divided by their sum
    scale        factor of the weights behind that
    bias         [E] float32, added to the scores for the choice alone
    num_groups   the experts stand in that many groups, of which the best num_chosen_groups alone may be chosen from
    group_score  of a group: its largest score, or the sum of its two largest, bias included

    Of equal scores the lower id goes first. Raises ConfigError for numbers and words that fit no mixture. Sources:
    `framework.layers.experts.route`.
    """

    k: int
    scores: Literal["softmax", "sigmoid", "selected"] = "softmax"
    normalizes: bool = False
    scale: float = 1.0
    bias: Tensor | None = field(default=None, compare=False)
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid", "selected"):
            raise ConfigError(f"Routing.scores={self.scores!r} must be softmax, sigmoid or selected")
        if self.group_score not in ("max", "top2"):
            raise ConfigError(f"Routing.group_score={self.group_score!r} must be max or top2")
        if self.k < 1:
            raise ConfigError(f"Routing.k={self.k} must be at least 1: a token needs an expert")
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ConfigError(
                f"Routing.num_chosen_groups={self.num_chosen_groups} must be at least 1, and at most "
                f"num_groups={self.num_groups}"
            )

    def check(self, num_experts: int) -> None:
        """Raises ConfigError where a mixture of so many experts cannot be routed like this."""
        groups, size = self.num_groups, num_experts // self.num_groups
        if num_experts % groups:
            raise ConfigError(
                f"Routing.num_groups={groups} does not divide {num_experts} experts, and groups are of one size. "
                f"Choose a divisor of {num_experts}"
            )
        if self.k > self.num_chosen_groups * size:
            raise ConfigError(
                f"Routing.k={self.k}: {self.num_chosen_groups} of {groups} groups of {size} experts hold "
                f"{self.num_chosen_groups * size}. Choose a smaller k, or more groups"
            )
        if self.group_score == "top2" and self.num_chosen_groups < groups and size < 2:
            raise ConfigError(
                f"Routing.group_score='top2' adds up the two best experts of a group, and {groups} groups of "
                f"{num_experts} experts have one each. Choose fewer groups, or 'max'"
            )
        if self.bias is not None and self.bias.shape != (num_experts,):
            raise ConfigError(
                f"Routing.bias has the shape {tuple(self.bias.shape)}, and there are {num_experts} experts. "
                "Give it one value an expert"
            )


@dataclass(frozen=True)
class ExpertWeights:
    """Feed-forward blocks of E experts in the model's dtype: gate_up [E, 2 I, H] with the gate's rows first, down
    [E, H, I], biases [E, 2 I] and [E, H].

    activation  "silu": silu(gate) * up. "clamped": gate at most `limit`, up within it on both sides, and then
                (up + 1) * gate * sigmoid(1.702 * gate)
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Literal["silu", "clamped"] = "silu"
    limit: float = 7.0


class Experts(Protocol):
    """A packed mixture of experts; the torch reference is `framework.layers.experts`.

    counts  [E] int64 on the device: tokens that each expert was given so far, padding left out
    """

    counts: Tensor

    def __call__(self, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """x [T, H], router logits [T, E] float32 -> [T, H] in x's dtype: the weighted outputs of each token's experts,
        summed in float32 in the order of their choice. num_tokens as in `ForwardContext`; what comes out for padding
        means nothing, and is finite. A token whose logits are not finite gets k experts, each once, and spoils no other
        one's output."""


@runtime_checkable
class AddsBeside(Protocol):
    """Of `Experts` that add the output of another block in the launch that sums theirs; others need not."""

    def beside(self, other: Tensor, x: Tensor, logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """other [T, H] and the experts' output of x, summed in float32 and rounded once."""


@dataclass(frozen=True)
class BackendContext:
    """dtype and graphs are the words of `engine.dtype` and `engine.graphs`."""

    dtype: str = "auto"
    batch_invariant: bool = False
    graphs: str = "auto"


@runtime_checkable
class Backend(Protocol):
    """A device: its memory, its dense products, its array functions, and how a step is compiled and run on it.

    max_num_batched_tokens  of a step, when `scheduler.max_num_batched_tokens` is null
    compile_seconds         that it has spent so far on compiling what it runs, apart from recording steps
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    caps: Capabilities
    step_ops: StepOps
    layer_ops: LayerOps
    max_in_flight: int
    max_num_batched_tokens: int
    compile_seconds: float

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Packs weight [out, in] for this device; the argument may be dropped by the caller afterwards."""

    def pack_experts(self, weights: ExpertWeights, routing: Routing) -> Experts:
        """Packs a mixture of experts for this device; the argument may be dropped by the caller afterwards."""

    def allocate_kv(self, specs: Sequence[KVSpec], num_blocks: int) -> list[Tensor]:
        """One zeroed tensor a spec, for `num_blocks` blocks (null block included). Each holds a layer of every KV
        group: a block belongs to one group."""

    def profile(self, forward: Callable[[], Any]) -> None:
        """Asked once weights are loaded: may run `forward`, the largest step without its attention, so as to know what
        a step takes beside them."""

    def kv_bytes_available(self, max_model_len: int, bytes_per_token: int, fraction: float | None) -> int:
        """Bytes to give to KV blocks when `kv_cache.num_blocks` is null."""

    def copy_blocks(self, kv: Sequence[Tensor], specs: Sequence[KVSpec], pairs: Sequence[tuple[int, int]]) -> None: ...
    def gather_blocks(self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int]) -> list[Tensor]:
        """Host copies [n, ...] a layer of whole blocks, in the order asked."""

    def scatter_blocks(
        self, kv: Sequence[Tensor], specs: Sequence[KVSpec], blocks: Sequence[int], data: Sequence[Tensor]
    ) -> None: ...
    def host_memory(self, num_words: int) -> Tensor:
        """Zeroed int64 host memory that copies to the device read without waiting for it: pinned, where that exists."""

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
        """Padded shapes of decode steps to compile or capture, smallest first; empty means exact shapes, eagerly."""

    def compile(self, step: Callable[..., Any], bucket: Bucket | None) -> Callable[..., Any]:
        """An executable of the step's device part: the step itself for None, whose arguments differ from call to call.

        For a bucket the step takes no arguments: everything it reads and writes has a fixed address, and its value
        holds the same tensors each time. It may be called here, for a trial and while it is recorded; its caller has
        seen to it that this harms nobody. Those of the largest bucket are compiled first.
        """

    def submit(
        self, executable: Callable[..., Any], args: tuple[Any, ...], collect: Callable[[Any], StepOutput]
    ) -> StepFuture:
        """Starts executable(*args). The future's `result` waits for the device and then returns collect(its value), in
        which tensors are on the host: its lists, tuples, dicts and dataclasses are looked through. Of a step that
        was compiled for a bucket, `collect` copies what it keeps: the memory may be that of a later one.
        """


@runtime_checkable
class CompilesAhead(Protocol):
    """Of a backend that compiles what steps launch, and can do so for several of them at a time; others need not."""

    def telling(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Those of the buckets whose steps launch together all that the steps of any of them do."""

    def compile_ahead(self, steps: Iterable[Callable[[], Any]]) -> None:
        """Compiles what the steps launch, before any of them is compiled or submitted. Each is called, one behind the
        other, in such a way that nothing of it is executed; what it raises is dropped, for it comes again."""


class StepFuture(Protocol):
    """A step on its way. `result` is the only place where the host waits for the device."""

    def result(self) -> StepOutput:
        """Waits for the step and returns its output; raises what the step raised."""

    def done(self) -> bool: ...


# ------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionCaps:
    """What an attention plugin can serve; a choice outside of it is refused at start-up, naming both sides.

    graph  which plans can be recorded and run again: those of padded steps of decodes ("decode"), and with "always"
           those of a batch that is `ragged` as well
    """

    block_sizes: tuple[int, ...] = (16,)  # the first is the default
    any_block_size: bool = False
    head_dims: tuple[int, ...] = ()  # empty = any
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    graph: Literal["always", "uniform", "decode", "never"] = "never"
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    latent: bool = False  # serves latent layers, and no others: its plans are `LatentPlan`s
    tree: bool = False
    needs_exact_lens: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class AttentionContext:
    """What an attention plugin is built with; dtype is that of queries, keys and values."""

    backend: Backend
    block_size: int
    dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_invariant: bool


class AttentionPlan(Protocol):
    """One step's attention for one KV group: made once a step on the host, called once a layer."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k, v [T, Hk, D] to their slots, then attends. q [T, Hq, D] -> [T, Hq, D].

        A query token reads keys at positions <= its own (and > its own - window). 0 for seq_len 0, never NaN.
        """


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms over each query and each key head, before the rotation. q_weight, k_weight [D] in the model's dtype."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of a step's tokens: table [max_model_len, 2, D] float32 holds cosines and sines of each position
    in the layout of `LayerOps.rotate`, positions [T] int64."""

    table: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LatentUp:
    """The products that expand a latent into keys and values of each head: keys [H, d_nope, value_dim], values
    [H, d_value, value_dim], in the model's dtype."""

    keys: Tensor
    values: Tensor


class LatentPlan(Protocol):
    """One step's attention for a group of latent layers. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Writes latent [T, head_dim] to its slots, then attends. q [T, H, d_nope + d_rope], its last d_rope rotated;
        latent: the normalised latent and the rotated key that all heads share, side by side. -> [T, H, d_value].

        Whether keys and values are expanded, or queries and outputs absorbed, is the plan's to choose.
        """


@dataclass(frozen=True)
class LatentNorm:
    """RMS norm over each latent, its rotated key left out. weight [value_dim] in the model's dtype."""

    weight: Tensor
    eps: float


@runtime_checkable
class TakesLatentProjections(Protocol):
    """Of a `LatentPlan` that normalises latents and rotates queries and keys in the launches that read and write
    them."""

    def forward_latent_projections(
        self, layer: int, q: Tensor, latent: Tensor, rotation: Rotation, norm: LatentNorm, up: LatentUp
    ) -> Tensor:
        """q [T, H, d_nope + d_rope] and latent [T, head_dim] as projected. As `forward_latent` of a latent that is
        normalised, and of the last d_rope of queries and latents rotated, up to rounding. q keeps its values."""


@runtime_checkable
class TakesProjections(Protocol):
    """Of an `AttentionPlan` that normalises and rotates heads in the launch that writes them to their slots."""

    def forward_projections(
        self, layer: int, heads: Tensor, rotation: Rotation | None, norms: HeadNorms | None
    ) -> Tensor:
        """heads [T, Hq + 2 Hk, D] as projected: queries, keys, values. As `forward` of queries and keys that are
        normalised (unless norms is None) and rotated (unless rotation is), up to rounding. heads may be overwritten."""


@runtime_checkable
class AttentionBackend(Protocol):
    """Paged attention over one KV group. plan() uses host twins only and never waits for the device."""

    caps: ClassVar[AttentionCaps]

    def kv_spec(self, layer: LayerSpec) -> KVSpec: ...
    def bind(self, layers: Sequence[LayerSpec], kv: Sequence[Tensor]) -> None:
        """Called once after allocation: kv[i] belongs to layers[i]."""

    def add_request(self, req_idx: int) -> None:
        """The row's blocks so far are void: another request has it, or blocks were replaced. Between two such calls
        the blocks of a row only grow. A batch that `goes_on` has had no such call since the one before it."""

    def release(self, req_idx: int) -> None: ...
    def plan(self, batch: InputBatch, group: int) -> AttentionPlan: ...


@runtime_checkable
class TakesWorkspace(Protocol):
    """Of an attention backend whose layers take memory for the while of a call that is worth counting beside the
    largest step; a backend need not have it."""

    def workspace_bytes(self, layer: LayerSpec, q: Tensor, out: Tensor) -> int:
        """Most that one call takes beside its arguments and `out`, in any step of as many tokens. q [T, Hq, D] are
        queries, and out [T, Hq, D_value] what they become. Asked before `bind`."""


@runtime_checkable
class PrefersOwnShape(Protocol):
    """Of an attention backend with caps.graph "always" that serves some steps with prompts better piece by piece."""

    def prefers_own_shape(self, num_scheduled: NDArray[np.int32], max_lens: NDArray[np.int32]) -> bool:
        """Of a step: tokens of each row, and upper bounds of the rows' lengths behind it, both [R]."""


# ---------------------------------------------------------------------------------------- models and loaders


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, before any weight is read.

    config             config.json of the Hugging Face layout (a GGUF header is translated into the same keys)
    generation_config  generation_config.json, {} when there is none
    location           folder or file; format: a loader's name
    tokenizer          what `framework.tokenizer` reads (a folder, or a parsed GGUF vocabulary), None without one
    """

    location: Path
    format: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of model classes; CheckpointError when the config holds anything else there."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{self.location}: architectures={names!r} must be a list of names. Correct config.json."
            )
        return tuple(names)


class WeightSource(Protocol):
    """Named tensors of a checkpoint, read when they are asked for; names are those of the Hugging Face layout."""

    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in `dtype` (default: the engine's), on the host or the device it was opened for.

        Raises CheckpointError naming the tensor when it is missing, damaged, or of another shape.
        """

    def unused(self) -> list[str]:
        """Names that nobody took: the builder refuses a checkpoint that has some (but for those a model ignores)."""

    def close(self) -> None: ...


class Loader(Protocol):
    """Reads one checkpoint format. Built as Loader(options, None)."""

    def checkpoint(self, location: Path) -> Checkpoint: ...
    def open(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, seed: int) -> WeightSource: ...


@dataclass
class ModelContext:
    """What a model is assembled from. `layers` collects the attention layers it declares, in order, and `experts` its
    mixtures of experts by name.

    Constructors of `framework.layers` take this object: it carries the device, the dtype and the backend's operations.
    """

    backend: Backend
    weights: WeightSource
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    layers: list[LayerSpec] = field(default_factory=list)
    experts: dict[str, Experts] = field(default_factory=dict)

    def add_experts(self, name: str, weights: ExpertWeights, routing: Routing) -> Experts:
        """Packs a mixture of experts, and makes its counts known under `name`, which no other one has. Raises
        ConfigError for a routing that does not fit it."""
        assert name not in self.experts, name
        routing.check(len(weights.down))
        packed = self.experts[name] = self.backend.pack_experts(weights, routing)
        return packed

    def add_layer(
        self,
        group: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
    ) -> int:
        """Declares an attention layer and returns its index, the `layer` of `AttentionPlan.forward`. Layers of one
        group share kind and window; the engine may split a group, so that groups fill memory alike. A window that holds
        max_model_len tokens is none: such a layer is one of the group `full`. Raises ConfigError where KV heads do not
        share out the heads evenly."""
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"attention layer {len(self.layers)}: num_heads={num_heads} is no multiple of "
                f"num_kv_heads={num_kv_heads}, and each KV head serves as many heads. Correct the sizes of the model"
            )
        if window is not None and window >= self.max_model_len:
            group, window = "full", None  # it would hide nothing, and cost a KV group
        spec = LayerSpec(
            len(self.layers), group, num_heads, num_kv_heads, head_dim, scale, window, softcap, sinks, value_dim
        )
        self.layers.append(spec)
        return spec.index


@dataclass
class ForwardContext:
    """What a forward pass needs beside its inputs: the plan of each attention layer, and layers whose inputs are asked
    for.

    plans       by `LayerSpec.index`; the layers of a KV group share one
    wanted      [L] int64, rising: the tokens whose hidden states will be read; None for all. A model may leave the
                others out behind its last attention.
    num_tokens  [1] int32 on the device: tokens from there on are padding, which no statistics count; None for none
    num_wanted  [1] int32 on the device, the same of what is wanted
    """

    plans: Sequence[Any]
    feature_layers: tuple[int, ...] = ()
    lora: Any = None
    wanted: Tensor | None = None
    num_tokens: Tensor | None = None
    num_wanted: Tensor | None = None


@dataclass
class ModelOutput:
    """hidden [T, H] after the final norm, or [L, H] of the tokens that are `wanted`; features [T, H]: hidden states
    asked for by `feature_layers`."""

    hidden: Tensor
    features: tuple[Tensor, ...] = ()


class Model(Protocol):
    """A decoder assembled from `framework.layers`. Exportable: no .item(), no branch on tensor values.

    Built as Model(config: Mapping, ctx: ModelContext), where config is `Checkpoint.config`.

    caps   optional, of the class: what it keeps of `graph_safe` and `batch_invariant`; all of it without
    label  optional, of the class: what a user should know of it, told when the engine is ready and by `run=explain`
    """

    vocab_size: int
    ignored_weights: tuple[str, ...]  # regular expressions of tensors it leaves out on purpose

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, H]."""

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput: ...
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V] in the model's dtype; V is the vocabulary of the checkpoint, without padding."""


# --------------------------------------------------------------------------------------------------- sampler

StageKind = Literal["mask", "elementwise", "threshold", "select", "observe"]


@dataclass(frozen=True)
class StageSpec:
    """What a sampler stage declares about itself.

    fields     columns it keeps in the request table
    params     SamplingParams fields it reads: a request that names one which no active stage reads is refused
    caps       needs / keeps, see Capabilities
    essential  True for stages a request cannot switch off (grammar, allowed ids, min_tokens)
    extra_args names it knows in a request's extra_args of the stage: a request with another one is refused
    tells_requests  observe: requests that want it find what it tells of their tokens in `CompletionOutput.payloads`
    fused      operation of `SamplerOps` that does the same on a device; the stage then has `operands`
    """

    name: str
    kind: StageKind
    fields: tuple[Field, ...] = ()
    params: tuple[str, ...] = ()
    caps: Capabilities = Capabilities()
    essential: bool = False
    extra_args: tuple[str, ...] = ()
    tells_requests: bool = False
    fused: str | None = None


@dataclass(frozen=True)
class StageContext:
    """What a stage may use. num_rows: rows of the request table, the null row included.

    column     a `Column` of a field of its own spec; a `PooledColumn` of a field that is declared as pooled
    token_ids  [num_rows, max_model_len] int32 tokens of each row on the device. Those before the `position` of a logits
               row are its history, drafts before it included; what stands behind means nothing
    encode     token ids of a text without special tokens; None for a model without a tokenizer
    stream     of keyed random numbers (`framework.rng`), its own: it follows from the stage's key in the pipeline
    """

    device: torch.device
    vocab_size: int
    num_rows: int
    max_num_logits: int
    eos_token_ids: tuple[int, ...]
    column: Callable[[str], Any]
    token_ids: Tensor
    encode: Callable[[str], list[int]] | None = None
    stream: int = 16


@runtime_checkable
class SamplerStage(Protocol):
    """One step of the sampler. State lives in declared fields only, so rows can be reused, captured and checked.

    Of mask, elementwise, threshold, select and observe a stage implements the method of its kind.
    """

    spec: ClassVar[StageSpec]

    def wants(self, params: SamplingParams) -> bool:
        """Whether the request uses this stage; decided once, at admission."""

    def validate(self, params: SamplingParams) -> None:
        """Raises ValueError when the request's parameters cannot be served, values of its own `extra_args` included."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        """Overwrites every field of the row: rows are reused."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """mask, elementwise: changes float32 logits [L, V] in place; bit-equal for rows that did not want it."""

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """threshold: narrows [lo, hi], float32 [L]. A token is kept iff lo <= logit <= hi.

        Sees mass and count inside the incoming interval only. Never empties a row that was not empty.
        """

    def select(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> Tensor:
        """select: int64 [L] token ids out of the kept ones; the lowest id on ties."""

    def observe(self, raw_logits: Tensor, logits: Tensor, rows: Rows, ids: Tensor) -> Any:
        """observe: a payload on the device."""

    def collect(self, payload: Any) -> Any:
        """observe: the payload on the host, after the step; a list with an entry a logits row if the stage's spec says
        that it tells requests."""

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """The only place where state changes in a step, on the device. sampled [R, k + 1], num_valid [R]."""


class FusedStage(Protocol):
    """What a stage has beside `SamplerStage` when its spec names a fused operation."""

    def operands(self, rows: Rows) -> Mapping[str, Any] | None:
        """Device tensors of the operation, by name; None for rows that only the stage's own method serves."""


FusedChain = Sequence[tuple[str, Mapping[str, Any]]]
"""Operations in pipeline order, each with its operands."""


@dataclass(frozen=True)
class FusedChoice:
    """[L] each: id int64, in range; the same or -1 for a row without a finite choice; float32 largest processed logit,
    that of the id, and for rows that draw the log of the sum of exponentials of what was kept, where it was made."""

    ids: Tensor
    told: Tensor
    top: Tensor
    value: Tensor
    log_sum: Tensor | None = None


@dataclass(frozen=True)
class FusedLogprobs:
    """sampled [n] float32, rank [n] int32; top_ids [n, k] int64, top_logprobs float32, top_ranks int32."""

    sampled: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top_ranks: Tensor


class SamplerOps(Protocol):
    """Sampler operations that a backend runs in few launches: its `sampler_ops`. A backend need not have any.

    compiles  whether each set of operations costs a compilation: then few sets are asked for, of which one serves all
    fuses  names of operations, in the one order in which a chain may hold them, each once. The reference of one is the
           torch method of the stage that names it, and decides what it means; floats may differ by rounding,
           comparisons of processed logits may not. In use, columns [rows] being those of the request table:

    bitmask    words [G, ceil(V / 32)] int32, logits_rows [G] int64 or None for all in order
    allowed    words [places, ceil(V / 32)] int32, place [rows]: place 0 has everything
    ban_until  until [rows], ids [rows, n]: forbidden while position < until; a negative id ends the list
    bias       count [rows]; ids and values [places, n], each with its ids_place and values_place
    penalties  repetition, frequency, presence [rows]; seen [places, V] int32 with place: the count of a token in the
               output, and bit 30 for one of the prompt
    scale      factor [rows]
    min_p      log_min_p [rows]; top_k: k [rows], 0 for off; top_p: top_p [rows], 1 for off
    draw       draws [rows], not 0 for rows that draw, the others being greedy; argmax: nothing

    Logits [L, V] are of any float dtype and stay as they are; a factor is positive. Nothing waits for the device, and
    on one that captures steps every shape follows from those of the arguments.
    """

    fuses: tuple[str, ...]
    compiles: bool

    def apply(self, logits: Tensor, rows: Rows, chain: FusedChain) -> Tensor:
        """New float32 [L, V]: logits behind a chain of masks and elementwise operations."""

    def bounds(self, logits: Tensor, rows: Rows, chain: FusedChain, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The interval behind a chain of thresholds, as `SamplerStage.bounds`."""

    def sample(
        self, logits: Tensor, rows: Rows, chain: FusedChain, interval: tuple[Tensor, Tensor] | None
    ) -> FusedChoice:
        """Tokens of a chain that ends with a select operation; interval None keeps everything."""

    def logprobs(self, logits: Tensor, ids: Tensor, k: int, *, is_log: bool) -> FusedLogprobs:
        """Of the ids [n] int64 and of the k best (`sampling.logprobs.FEW_BEST` at most) of logits [n, V]; the logits
        themselves unless is_log."""


@runtime_checkable
class Forbids(Protocol):
    """Of a sampler stage that forbids single tokens whatever is generated; a stage need not have it."""

    def forbidden_ids(self, params: SamplingParams) -> Collection[int]:
        """Asked at admission, after `validate`: an `allowed_token_ids` that holds no other id is refused."""


# ------------------------------------------------------------------------- speculation, grammar, connector, executor


class Drafter(Protocol):
    """Proposes draft tokens. on_host: gets committed tokens only, and runs a step late under async scheduling."""

    on_host: bool
    num_lookahead: int

    def propose(self, ctx: Any, features: Any, sampled: Tensor, num_valid: Tensor, out: Any) -> None: ...


@dataclass(frozen=True)
class GrammarSpec:
    """What a text must be; equal ones share a compilation.

    kind  json, json_object, regex, choice, grammar or structural_tag: the fields of `StructuredOutputsParams`
    text  a JSON schema, nothing, an expression, a JSON list of strings, EBNF, a structural tag as JSON
    """

    kind: str
    text: str


@dataclass(frozen=True)
class GrammarContext:
    """What a grammar knows of the engine. Which ids end a request is not among it: the engine adds those itself.

    tokens          [vocab_size] bytes that each id adds to a text. Nothing for ids that stand for no text and that no
                    grammar allows by itself: special tokens, eos, padding of the vocabulary
    special_tokens  {id: name} of special tokens, for grammars that ask for one by its name
    encode          token ids of a text without special tokens
    max_rollback    tokens that a matcher must be able to take back
    """

    tokens: Sequence[bytes]
    special_tokens: Mapping[int, str]
    encode: Callable[[str], list[int]]
    max_rollback: int = 64

    @property
    def vocab_size(self) -> int:
        """Ids of the model, padding included; a bitmask has ceil(vocab_size / 32) words."""
        return len(self.tokens)


class GrammarMatcher(Protocol):
    """One request's place in a grammar: what was taken, and what may come next. Knows text, and no end of a request.

    Its methods are called one at a time, from one thread or another.
    """

    def fill(self, row: NDArray[np.int32]) -> None:
        """Overwrites [ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 says whether id i may come next. Where
        the text is forced, one spelling of it is enough."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Takes all of the tokens; False when one of them does not fit, and then nothing was taken."""

    def rollback(self, n: int) -> None:
        """Takes back the last n tokens. ValueError for more than were taken, or than `max_rollback`."""

    def is_accepting(self) -> bool:
        """Whether what was taken is a whole text: the request may end here."""

    def is_terminated(self) -> bool:
        """Whether it is whole and nothing can follow."""


class CompiledGrammar(Protocol):
    """A constraint that any number of requests share."""

    def matcher(self) -> GrammarMatcher:
        """A new one, at the beginning. Cheap: called on the step's path."""


@runtime_checkable
class Grammar(Protocol):
    """Turns constraints into masks of tokens. Built as Grammar(options, GrammarContext) for the first request that has
    one; used from several threads at a time."""

    def check(self, spec: GrammarSpec) -> None:
        """Raises ValueError with the reason why the constraint cannot be served. Cheap: on the caller's thread."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Off the step's path, of a spec that `check` let pass; what it raises ends the requests that wait for it."""


@dataclass(frozen=True)
class ConnectorContext:
    """What a KV connector knows of its engine. KV may be exchanged where all of it is equal.

    identity     digest of all that changes KV beside tokens, adapter, salt and images: weights, backend, dtype, layout
    block_size   tokens of a block, in every KV group; num_groups: KV groups of a request's block lists
    block_bytes  of one block in all layers of its group
    """

    identity: bytes
    block_size: int
    num_groups: int
    block_bytes: int


class KVConnector(Protocol):
    """Moves KV between engines or memories. Built as KVConnector(options, ConnectorContext).

    The two sides may run on two threads. A stay of a request in the block pool, from `after_alloc` until it finishes,
    is preempted or aborted, is named by its lease, `Request.lease`: transfers are reported by lease, since ids come
    back. Every asynchronous load that was allocated and every kept stay must be reported in the end, also after a
    failure, and a load even when its request has gone: until then nobody else gets the blocks. Blocks of a
    request may be read up to `Request.num_published_blocks`, which are whole, computed, and never written again.

    layerwise     the worker side wants wait_layer before and save_layer after each layer in steps that carry metadata.
                  An attribute of the class, since it is asked before weights load
    is_layerwise  optional, a class method instead: `is_layerwise(options)` of a class whose options decide, as those of
                  one that stands around another connector
    """

    layerwise: bool

    # Scheduler side.

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond the local hit or None for `ask again`, whether they load asynchronously). No side effects. The
        scheduler admits the request with this answer, or leaves it waiting, before it asks about another one."""

    def after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A stay begins with blocks [group][index]. The last `num_external_tokens` of the request's
        num_computed_tokens are to be loaded into them; 0 when nothing is. Called once a stay, loads of both kinds."""

    def build_meta(self, scheduled: SchedulerOutput) -> Any:
        """What the worker side does in this step, None for nothing. Changes nothing of `scheduled`."""

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """The stay ends for good. True: the connector keeps the blocks until it reports the lease as sent."""

    def request_preempted(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """The stay ends, and the request comes back in another one. The answer means what request_finished's does."""

    def step_lost(self, meta: Any) -> None:
        """The step of `meta` failed, and its wait_saves may never come. What the worker side had not begun is given up,
        and reported with the next step: kept stays as sent, asynchronous loads as received, their blocks as failed.
        Nobody waits for loads within the step any more."""

    # Worker side.

    def bind(self, backend: Backend, kv: Sequence[Tensor], specs: Sequence[KVSpec]) -> None:
        """Called once, before the first step: kv[i] is the memory of the i-th layer of each KV group, laid out as
        specs[i]. With one group that is layer i, and only then may a connector be layerwise."""

    def start_load(self, meta: Any) -> None:
        """Before the forward pass, after the step's block operations. A load within the step is done, or waited for in
        wait_layer, before its layer is read."""

    def wait_layer(self, layer: int) -> None: ...
    def save_layer(self, layer: int) -> None: ...
    def wait_saves(self, meta: Any) -> None:
        """After the forward pass: what the step of `meta` had to read has been read. The start_load of a later step may
        come before it, where a device computes several steps one behind the other."""

    def idle(self) -> None:
        """In the place of a forward pass when a step has no rows: may wait a moment for a transfer to end. The engine
        waits one as well while something is to be reported."""

    def finished(self) -> tuple[Sequence[int], Sequence[int]]:
        """(sent, received) leases since the last call, each once."""

    def failed_blocks(self) -> Sequence[int]:
        """Blocks whose load failed since the last call; of a load within a step at the latest in that step, of an
        asynchronous one at the latest together with its lease. Blocks of a load within a lost step count for nothing:
        they may be another request's by now."""

    def close(self) -> None:
        """The engine ends, or goes on without the connector: no transfer touches its memory afterwards. If this raises
        while transfers are under way, the engine stops."""


class Executor(Protocol):
    """Runs steps somewhere: in this process, in others, on other hosts."""

    max_in_flight: int

    def start(self) -> None: ...
    def execute(self, scheduled: SchedulerOutput) -> StepFuture: ...
    def broadcast(self, method: str, *args: Any) -> Sequence[Any]: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class BenchRound:
    """What one pass of a workload gave. figures: one value each; samples: values of single requests, for a plot;
    points: of a workload that is a sweep, what JSON tells of each point."""

    figures: Mapping[str, float]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    points: Sequence[Mapping[str, Any]] = ()


class Bench(Protocol):
    """A workload of `run=bench`. Built as Bench(options, Config); imports no torch before it measures.

    units      of each figure, in the order in which they are shown
    parts      figures that add up to a whole, for a plot; may be empty
    num_units  what a round counts on the progress bar
    unread     optional: {key of the command line that it sets itself: what to do instead}, refused when it is typed
    begin      optional: `begin(RunArgs)` before anything runs: refuses words; `server.*` is left to it
    warm_up    optional: `warm_up(number, advance)`, an untimed pass, where a whole round would be more than it takes
    facts      optional: {name: value} of what was measured, for the report, where it is no engine of this process
    shown      optional: {key: value} of its options that the page tells, where all of them are too many
    lines      optional: `lines(report) -> list[str]`, what the page shows instead of a line a figure
    plot       optional: `plot(path, report)` draws run.plot= instead of samples and parts
    close      optional: `close()` after the last round or an error
    """

    needs_engine: bool
    units: Mapping[str, str]
    parts: tuple[str, ...]
    num_units: int

    def check(self, engine: Any) -> None:
        """Raises ConfigError for a workload that this engine (None without one) cannot serve as it was asked for."""

    def round(self, engine: Any, number: int, advance: Callable[[int], Any]) -> BenchRound:
        """One pass, the same work each time. `advance(units done)` is called between steps: it may end the round by
        raising KeyboardInterrupt."""


class Observer(Protocol):
    """Watches; an observer that raises is dropped and named. Built as Observer(), with one method or more."""

    def on_request_added(self, request: Request) -> None: ...
    def on_step_end(self, stats: Any) -> None: ...
    def on_step(
        self, scheduled: SchedulerOutput, tokens: Sequence[NewTokens], stats: Any, counts: Mapping[str, int | float]
    ) -> None:
        """A step's decisions, what came of them, and the scheduler's counters afterwards; changes nothing of it."""

    def on_request_finished(self, request: Request, output: Any) -> None: ...
