"""The data that travels through one step, and nothing that acts on it: no torch is imported here.

Scheduler -> SchedulerOutput -> runner -> InputBatch -> model and sampler -> StepOutput -> scheduler.
A `SchedulerOutput` holds numpy arrays and plain objects only, so that the same object serves in one process,
in several, and on another host. `InputBatch` and `Rows` hold device tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.request import SamplingParams

NULL_BLOCK = 0
"""Physical block that belongs to nobody: padding writes and reads there. A pool never hands it out."""
NULL_ROW = 0
"""Row of the request table that belongs to nobody: padding rows point at it."""
PER_TOKEN, PER_32_TOKENS = -1, -32
"""Widths of fields that are as wide as the vocabulary, which a stage that declares them does not know yet."""


@dataclass(frozen=True)
class Field:
    """One column of the request table, declared by the core, a stage, a drafter or a backend.

    name    unique within its owner; the table prefixes the owner's name
    dtype   numpy dtype name: "float32", "int32", "int64", "bool", "uint64" (held as int64 bits on the device)
    width   1 gives a column [rows], more gives [rows, width]; below 0 it counts tokens of the vocabulary to a value:
            PER_TOKEN, PER_32_TOKENS (a bit a token of int32 words)
    init    the neutral value: a row that holds it makes its owner the identity (a captured graph runs every row)
    pooled  True gives a `PooledColumn`: memory only for requests that take it, for state as wide as the vocabulary
    lasting True for state that the known tokens do not tell: a preempted request finds it again when it comes back,
            written over what `add_request` left. Not with pooled. Steps in flight at a preemption count for nothing
            though they have been committed, up to `max_in_flight` of them: keep values by position where that matters
    """

    name: str
    dtype: str
    width: int = 1
    init: float | int | bool = 0
    pooled: bool = False
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.pooled and self.lasting:
            raise ValueError(f"field '{self.name}' cannot be both pooled and lasting. Leave out one of the two")

    def sized(self, vocab_size: int) -> Field:
        """The field with the width that it has for a vocabulary."""
        return self if self.width > 0 else replace(self, width=-(vocab_size // self.width))


class Column(Protocol):
    """A declared field as its owner sees it: a host mirror to write at admission, a device tensor to read in a step."""

    @property
    def np(self) -> NDArray[Any]:
        """[rows] or [rows, width] host mirror: write a row in `add_request` only; it travels with the admission."""

    @property
    def dev(self) -> Tensor:
        """[rows] or [rows, width] device tensor, a fixed address for the life of the engine; may be strided."""


class PooledColumn(Protocol):
    """A pooled field as its owner sees it: place `slot[req_idx]` of `dev` is the row's, place 0 is nobody's.

    Place 0 holds the neutral value for every row without a place, so a commit must leave it as it is.
    """

    @property
    def slot(self) -> Tensor:
        """[rows] int32 place of each row in the pool, 0 for none; a fixed address for the life of the engine."""

    @property
    def dev(self) -> Tensor:
        """[places, width]: read it anew in each step, a pool that grows moves."""

    def take(self, req_idx: int) -> NDArray[Any]:
        """A place for the row: neutral host values [width] to fill in during `add_request`."""

    def release(self, req_idx: int) -> None:
        """The pipeline calls it when the request leaves, and for one that does not want the stage."""


@dataclass(slots=True)
class NewRequest:
    """What the runner must know of a request that is admitted, or that returns after preemption.

    token_ids            [num_tokens] int32, every known token: the prompt and, after a preemption, outputs as well
    num_computed_tokens  tokens whose KV is there or comes with this step (prefix cache, connector, swap, a sibling's
                         blocks): any number below that of the known tokens
    """

    req_idx: int
    request_id: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    lora_slot: int = 0
    mm_features: Any = None


@dataclass(slots=True)
class BlockDelta:
    """Blocks appended to block tables in this step, ragged, for one KV group.

    rows    [n] int32 req_idx
    starts  [n] int32 first block-table column that is written
    counts  [n] int32 number of blocks
    ids     [sum(counts)] int32 physical blocks, NULL_BLOCK for columns that lie behind a window at admission
    at      [n] int32 batch row of each of rows, where each gets the one block that it enters with this step, in a step
            of decodes; None says nothing
    """

    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    at: NDArray[np.int32] | None = None


_NOTHING = np.zeros(0, np.int32)
NO_BLOCKS = BlockDelta(_NOTHING, _NOTHING, _NOTHING, _NOTHING)


@dataclass(slots=True)
class BlockOps:
    """Whole-block operations that run before the forward pass, in this order: swap_out, copy, swap_in, zero.

    copy, swap_in, swap_out: [(source, destination)]; zero: [block].
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copy or self.swap_in or self.zero)


@dataclass(slots=True)
class GrammarRows:
    """Tokens that logits rows may draw, where a request has a grammar; rows that are not named are free.

    logits_rows  [G] int32 rows of the step's logits, rising: a request with k draft tokens has k + 1 of them
    bits         [G, ceil(V / 32)] int32: bit i % 32 of word i // 32 is set for an id i that is allowed
    """

    logits_rows: NDArray[np.int32]
    bits: NDArray[np.int32]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's decisions. The scheduler makes it and nobody changes it afterwards: steps may share lists and arrays.

    Order of application: `finished`, `preempted` and `aborted` rows leave, then `new` rows arrive, then blocks.

    rows                  [R] int32 req_idx of every request that runs; R may be 0: only state is updated then
    num_scheduled_tokens  [R] int32, at least 1
    num_computed_tokens   [R] int32 tokens before this step's span
    samples               [R] bool, False for a chunk that leaves known tokens to compute
    new_block_ids         one BlockDelta a KV group
    num_drafts            [R] int32 draft tokens inside the span
    num_prompt_tokens     tokens of the step that stand in a prompt: what the counters call prefill
    only_decodes          every row computes one token and draws one; False says nothing
    goes_on               this step and the one scheduled before it are `only_decodes` of the same rows in the same
                          order, each one token further; nobody arrived or left, no block moved, block tables were at
                          most appended to, each drawn token has its place below max_model_len, and the step before
                          has not failed. It may be False always: True only spares work
    max_seq_len           upper bound of num_computed + num_scheduled over the rows, 0 when R is 0
    """

    step_id: int
    rows: NDArray[np.int32]
    num_scheduled_tokens: NDArray[np.int32]
    num_computed_tokens: NDArray[np.int32]
    samples: NDArray[np.bool_]
    num_drafts: NDArray[np.int32]
    new: list[NewRequest] = field(default_factory=list)
    new_block_ids: tuple[BlockDelta, ...] = ()
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    only_decodes: bool = False
    goes_on: bool = False
    block_ops: BlockOps = field(default_factory=BlockOps)
    # Null until the part that fills them is built; a runner that meets a filled one it does not know must refuse.
    encoder_inputs: Any = None
    encoder_freed: Any = None
    grammar_rows: GrammarRows | None = None
    pooling_rows: Any = None
    lora_slots: Any = None
    connector_meta: Any = None
    kv_replay: Any = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @property
    def max_seq_len(self) -> int:
        return int((self.num_computed_tokens + self.num_scheduled_tokens).max()) if len(self.rows) else 0


@dataclass(slots=True)
class InputBatch:
    """Views of fixed device buffers for one step; `step_ops.prepare` fills them whole.

    T tokens, R batch rows, L logits rows. Tensors are int64 unless said otherwise, for torch indexing.

    input_ids             [T] int32 token ids
    positions             [T] position of each token in its own sequence
    query_start_loc       [R + 1]; row r owns tokens query_start_loc[r] .. query_start_loc[r + 1]
    seq_lens              [R] readable context after this step's tokens are written; 0 for padding rows
    idx_mapping           [R] batch row -> req_idx; padding rows point at NULL_ROW
    logits_indices        [L] token whose hidden state gives logits row l
    expanded_idx_mapping  [L] logits row -> req_idx
    draft_offset          [L] int32 draft rows of the same request before this one
    slot_mapping          per KV group [T]: KV slot each token writes to (block * block_size + offset);
                          padding token i writes slot i % block_size of the null block
    block_table           per KV group [rows, max_blocks] int32, indexed by req_idx (idx_mapping), not by batch row;
                          NULL_BLOCK behind a request's last block. In a group with a window, columns that lie whole
                          behind it mean nothing: their blocks are somebody else's, or nobody's
    Host twins: rows_np [R] int32, num_scheduled_tokens_np [R] int32, logits_rows_np [L] (batch row of each logits row),
    seq_lens_max_np [R] int32 (upper bound; exact when no step is in flight).
    goes_on: as in `SchedulerOutput`; what an owner worked out for the last step may be moved on instead of made anew.
    grammar_rows: as in `SchedulerOutput`, on the host.
    ragged: the batch of a step that is compiled once for any split of at most T tokens over at most R rows. The tensors
    tell which it is. Rows of NULL_ROW without tokens stand last, and tokens behind the last row's are padding. Host
    twins are bounds: num_scheduled_tokens_np is 0, seq_lens_max_np the longest that any row may get.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    idx_mapping: Tensor
    logits_indices: Tensor
    expanded_idx_mapping: Tensor
    draft_offset: Tensor
    slot_mapping: tuple[Tensor, ...]
    block_table: tuple[Tensor, ...]
    rows_np: NDArray[np.int32]
    num_scheduled_tokens_np: NDArray[np.int32]
    logits_rows_np: NDArray[np.int32]
    seq_lens_max_np: NDArray[np.int32]
    goes_on: bool = False
    grammar_rows: GrammarRows | None = None
    ragged: bool = False


@dataclass(slots=True)
class AllowedTokens:
    """`GrammarRows` on the device. rows [G] int64 logits rows, None when the G rows are all; bits as there."""

    rows: Tensor | None
    bits: Tensor


@dataclass(slots=True)
class Rows:
    """The logits rows of one step as sampler stages see them: device tensors of one length, never selected by a mask.

    req_idx     [L] int64 row of the request table
    offset      [L] int32 draft rows of the same request before this one
    position    [L] int64 index, in prompt + output, of the token that this row draws
    seed        [L] int64 bits of the request's 64-bit seed
    drafts      [R, k] int64 draft tokens, k = 0 without a drafter
    num_drafts  [R] int32
    req_idx_np  [L] int32 host twin of req_idx
    allowed     tokens that rows with a grammar may draw; None when no row has one. For masks, which see every row of
                the step: a part of the rows that a later stage is given does not renumber it
    """

    req_idx: Tensor
    offset: Tensor
    position: Tensor
    seed: Tensor
    drafts: Tensor
    num_drafts: Tensor
    req_idx_np: NDArray[np.int32]
    allowed: AllowedTokens | None = None

    def at(self, index: Tensor, index_np: NDArray[np.int64]) -> Rows:
        """The logits rows at `index`, with its host twin; drafts belong to batch rows, not to logits rows, and stay
        whole."""
        return replace(
            self,
            req_idx=self.req_idx.index_select(0, index),
            offset=self.offset.index_select(0, index),
            position=self.position.index_select(0, index),
            seed=self.seed.index_select(0, index),
            req_idx_np=self.req_idx_np[index_np],
        )


LogprobsRow = tuple["NDArray[np.int32]", "NDArray[np.float32]", "NDArray[np.int32]"]
"""Token ids [m], their logprobs [m] and ranks [m]."""


@dataclass(slots=True)
class LogprobsColumns:
    """Logprobs of one step on the host, one row a logits row; logits in the modes that tell logits.

    sampled        [L] float32 logprob of the sampled token, -inf for one that is masked
    rank           [L] int32, 1 + number of strictly larger logits
    top_ids        [L, k] int32 best ids in falling order, k = the most that a request of the step asked for; -1 where
                   a row was not asked for so many, with NaN and rank 0
    top_logprobs   [L, k] float32
    top_ranks      [L, k] int32 by the logits: logprobs are rounded, and may be equal where logits are not
    listed         {logits row: the ids that its request lists, with theirs}
    """

    sampled: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    top_ranks: NDArray[np.int32]
    listed: dict[int, LogprobsRow] = field(default_factory=dict)

    def beside(self, row: int, k: int) -> LogprobsRow:
        """What a logits row tells beside its sampled token: its k best, all that there are for -1, and those listed."""
        width = self.top_ids.shape[1] if k < 0 else k
        best = self.top_ids[row, :width], self.top_logprobs[row, :width], self.top_ranks[row, :width]
        if row not in self.listed:
            return best
        (ids, logprobs, ranks), more = best, self.listed[row]
        return np.append(ids, more[0]), np.append(logprobs, more[1]), np.append(ranks, more[2])


@dataclass(slots=True)
class Transfers:
    """What a KV connector's worker side reports with a step: leases that were sent or received, blocks that failed."""

    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    failed: Sequence[int] = ()


@dataclass(slots=True)
class StepOutput:
    """Result of one step, on the host.

    sampled       [R, k + 1] int32 tokens of each batch row, valid up to num_valid
    num_valid     [R] int32; 0 for a row that does not sample
    logprobs      row l belongs to the l-th sampled token in batch-row order; None when no row asked
    prompt_logprobs  {batch row: columns of the prompt's tokens from the second on}, of rows that asked and whose prompt
                  is whole with this step; None when no row asked
    errors        {batch row: message} for rows whose distribution is empty or not a number; their draw means nothing
    payloads      {stage name: whatever its `collect` returned}, but for stages that tell requests
    told          {stage name: an entry a logits row}, None for rows that do not want the stage
    timings       {"prepare": seconds, ...} host seconds of the step's parts
    connector     None when the connector has nothing to report
    is_lost       the step failed: nothing that it was told to do is sure, and it draws nothing
    """

    sampled: NDArray[np.int32]
    num_valid: NDArray[np.int32]
    logprobs: LogprobsColumns | None = None
    prompt_logprobs: dict[int, LogprobsColumns] | None = None
    pooled: Any = None
    drafts: Any = None
    connector: Transfers | None = None
    is_lost: bool = False
    errors: dict[int, str] = field(default_factory=dict)
    payloads: dict[str, Any] = field(default_factory=dict)
    told: dict[str, list[Any]] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
