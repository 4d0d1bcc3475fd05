"""One table of step shapes that every attention plugin must serve, and a float64 reference of what it must return.

A case says which requests run and how many tokens each computes; `build` turns it into an `InputBatch` with shuffled
blocks, and `reference` recomputes the answer from the keys in order. Called by the tests of attention plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from framework.batch import NULL_ROW, InputBatch
from framework.interfaces import LatentUp, LayerSpec


@dataclass(frozen=True)
class LatentSizes:
    """Of a latent layer: a head's query is nope + rope wide and its value `value`; kept of a token are rank + rope."""

    nope: int = 24
    rope: int = 16
    rank: int = 32
    value: int = 20


DEEPSEEK = LatentSizes(128, 64, 512, 128)
"""Of DeepSeek V2 and V3 (arXiv 2405.04434, section 2.1)."""


@dataclass(frozen=True)
class AttentionCase:
    """One step.

    computed, scheduled  tokens of each request before this step, and in it; (0, 0) is a padding row
    softcap, has_sinks   as in `LayerSpec`; scores and sinks of a case are of the size of 1
    padding_tokens       tokens behind the last request's, which write to the null block
    blocks_ahead         blocks that each request holds beyond its length, as for the rest of a prompt
    latent               sizes of a latent layer, in the place of num_kv_heads and head_dim
    """

    name: str
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    padding_tokens: int = 0
    blocks_ahead: int = 0
    latent: LatentSizes | None = None

    @property
    def query_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.nope + self.latent.rope

    @property
    def kept(self) -> tuple[int, int]:
        """Heads and width of what is kept of a token: its keys, or its latent."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim
        return 1, self.latent.rank + self.latent.rope

    @property
    def scale(self) -> float:
        return float(self.query_dim**-0.5)

    def layer(self, sinks: Tensor | None) -> LayerSpec:
        """The layer of the case, in a group of its own."""
        value_dim = None if self.latent is None else self.latent.rank
        heads, width = self.kept
        return LayerSpec(
            0, "layers", self.num_heads, heads, width, self.scale, self.window, self.softcap, sinks, value_dim
        )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.computed, self.scheduled, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.scheduled) + self.padding_tokens


CASES = (
    AttentionCase("one_token_of_one_request", (0,), (1,)),
    AttentionCase("one_decode", (40,), (1,)),
    AttentionCase("whole_prompt", (0,), (37,)),
    AttentionCase("prompt_fills_its_blocks", (0,), (64,)),
    AttentionCase("chunk_after_a_prefix_hit", (32,), (21,)),
    AttentionCase("chunk_in_the_middle_of_a_block", (19,), (30,)),
    AttentionCase("two_tokens_over_a_block_border", (15,), (2,)),
    AttentionCase("decodes_of_one_length", (31, 31, 31), (1, 1, 1)),
    AttentionCase("decodes_of_many_lengths", (3, 300, 64, 17, 1, 129), (1, 1, 1, 1, 1, 1)),
    AttentionCase("one_long_decode_among_short_ones", (1500, 5, 6, 7), (1, 1, 1, 1)),
    AttentionCase("decode_whose_block_is_new", (16, 32), (1, 1)),
    AttentionCase("decodes_and_chunks_mixed", (12, 0, 70, 33), (1, 25, 1, 18)),
    AttentionCase("chunks_only", (0, 16, 5), (9, 40, 3)),
    AttentionCase("padding_rows_and_tokens", (20, 0, 8, 0, 0), (1, 7, 1, 0, 0), padding_tokens=5),
    AttentionCase("only_padding", (0, 0), (0, 0), padding_tokens=3),
    AttentionCase("every_head_its_own_keys", (9, 50), (1, 12), num_heads=4, num_kv_heads=4),
    AttentionCase("one_kv_head", (9, 50), (1, 12), num_heads=8, num_kv_heads=1),
    AttentionCase("wide_heads", (30, 0), (1, 20), num_heads=2, num_kv_heads=1, head_dim=80),
    AttentionCase("heads_of_64", (30, 0, 64), (1, 20, 1), num_heads=4, num_kv_heads=2, head_dim=64),
    AttentionCase("heads_of_96", (30, 0), (1, 20), num_heads=3, num_kv_heads=1, head_dim=96),
    AttentionCase("heads_of_128", (30, 9), (1, 20), num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase("heads_of_256", (30, 0), (1, 12), num_heads=2, num_kv_heads=1, head_dim=256),
    AttentionCase("five_heads_a_kv_head", (33, 20), (1, 9), num_heads=10, num_kv_heads=2),
    AttentionCase("blocks_held_ahead", (40, 12, 0), (1, 9, 20), blocks_ahead=2),
    AttentionCase("window", (40, 10, 0), (1, 30, 50), window=24),
    AttentionCase("window_of_one", (5, 0), (1, 4), window=1),
    AttentionCase("window_within_a_block", (40, 70, 21), (1, 30, 1), window=5),
    AttentionCase("window_of_several_blocks", (300, 96, 5, 129), (1, 1, 1, 70), window=48),
    AttentionCase("window_longer_than_the_context", (20, 3), (1, 25), window=200),
    AttentionCase("softcap", (40, 0, 300), (1, 25, 1), softcap=1.5),
    AttentionCase("sinks", (40, 0, 300), (1, 25, 1), has_sinks=True),
    AttentionCase("sink_of_a_first_token", (0, 0), (1, 3), has_sinks=True),
    AttentionCase("window_softcap_and_sinks", (150, 37, 0), (1, 30, 9), window=21, softcap=1.5, has_sinks=True),
    AttentionCase(
        "windowed_decodes_with_padding",
        (33, 64, 7, 0),
        (1, 1, 1, 0),
        num_heads=8,
        num_kv_heads=2,
        window=32,
        softcap=2.0,
        has_sinks=True,
        padding_tokens=3,
        blocks_ahead=1,
    ),
)
_LATENT = LatentSizes()
LATENT_CASES = (
    AttentionCase("one_token_of_one_request", (0,), (1,), num_heads=4, latent=_LATENT),
    AttentionCase("one_decode", (40,), (1,), num_heads=4, latent=_LATENT),
    AttentionCase("whole_prompt", (0,), (37,), num_heads=4, latent=_LATENT),
    AttentionCase("chunk_after_a_prefix_hit", (32,), (21,), num_heads=4, latent=_LATENT),
    AttentionCase("two_tokens_over_a_block_border", (15,), (2,), num_heads=4, latent=_LATENT),
    AttentionCase("decodes_of_many_lengths", (3, 300, 64, 17, 1, 129), (1,) * 6, num_heads=4, latent=_LATENT),
    AttentionCase("decode_whose_block_is_new", (16, 32), (1, 1), num_heads=4, latent=_LATENT),
    AttentionCase("decodes_and_chunks_mixed", (12, 0, 70, 33), (1, 25, 1, 18), num_heads=4, latent=_LATENT),
    AttentionCase("chunks_with_and_without_a_context", (0, 48, 5), (9, 40, 3), num_heads=4, latent=_LATENT),
    AttentionCase(
        "padding_rows_and_tokens", (20, 0, 8, 0, 0), (1, 7, 1, 0, 0), num_heads=4, padding_tokens=5, latent=_LATENT
    ),
    AttentionCase("only_padding", (0, 0), (0, 0), num_heads=4, padding_tokens=3, latent=_LATENT),
    AttentionCase("one_head", (9, 50), (1, 12), num_heads=1, latent=LatentSizes(16, 16, 48, 64)),
    AttentionCase("many_heads", (9, 50), (1, 12), num_heads=24, latent=LatentSizes(32, 16, 32, 16)),
    AttentionCase("heads_of_deepseek", (40, 0), (1, 9), num_heads=4, latent=DEEPSEEK),
    AttentionCase("blocks_held_ahead", (40, 12, 0), (1, 9, 20), num_heads=4, blocks_ahead=2, latent=_LATENT),
)
"""For plugins that serve latent layers, and no others."""
LONG_CASES = (
    AttentionCase("decodes_of_32k", (32767, 9000, 3), (1, 1, 1), num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase("chunk_on_a_prefix_of_16k", (16000, 20000), (150, 1), num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase("whole_prompt_of_2k", (0,), (2100,), num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase("window_in_32k", (32000, 5000), (1, 200), num_heads=4, num_kv_heads=1, head_dim=64, window=1000),
    AttentionCase(
        "window_and_sinks_in_32k",
        (32000, 5000, 1000),
        (1, 200, 1),
        num_heads=16,
        num_kv_heads=2,
        head_dim=64,
        window=128,
        has_sinks=True,
    ),
    AttentionCase(
        "softcap_in_16k",
        (16000, 5000),
        (1, 200),
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        softcap=2.0,
    ),
    AttentionCase("sinks_in_16k", (16000, 5000), (1, 200), num_heads=16, num_kv_heads=2, head_dim=64, has_sinks=True),
)
"""Contexts that a device serves in a moment, and the processor does not."""


@dataclass
class BuiltCase:
    """A case with its inputs.

    batch           the step; row r of the batch is req_idx rows_np[r]
    q, k, v         [T, Hq, D], [T, Hk, D], [T, Hk, D]: this step's. Of a latent layer k is the latent, [T, 1, D], and
                    v has no values
    past            K and V of the tokens already computed, one pair a request, [computed, Hk, D]
    num_blocks      blocks that the tables name, null block included
    past_slots      KV slots of `past`, one a request
    sinks           [Hq] in the dtype of q, None without
    up              of a latent layer
    """

    case: AttentionCase
    batch: InputBatch
    q: Tensor
    k: Tensor
    v: Tensor
    past: list[tuple[Tensor, Tensor]]
    num_blocks: int
    past_slots: list[Tensor]
    sinks: Tensor | None = None
    up: LatentUp | None = None


def build(case: AttentionCase, block_size: int, dtype: torch.dtype, seed: int = 0) -> BuiltCase:
    """Random inputs of a case with shuffled physical blocks and shuffled request rows, on the host."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    keys, values = case.kept, (case.kept[0], 0 if case.latent else case.head_dim)
    past = [(normal(n, *keys), normal(n, *values)) for n in case.computed]
    rows, table, num_blocks = _tables(case, block_size, generator)
    slots = [_slots(table[row], 0, n, block_size) for row, n in zip(rows, case.computed, strict=True)]
    return BuiltCase(
        case=case,
        batch=batch_of(case, block_size, rows, table),
        q=normal(case.num_tokens, case.num_heads, case.query_dim),
        k=normal(case.num_tokens, *keys),
        v=normal(case.num_tokens, *values),
        past=past,
        num_blocks=num_blocks,
        past_slots=slots,
        sinks=normal(case.num_heads) if case.has_sinks else None,
        up=None if case.latent is None else _up(case.num_heads, case.latent, normal),
    )


def _up(num_heads: int, sizes: LatentSizes, normal: Callable[..., Tensor]) -> LatentUp:
    """Products whose results are of the size of 1, as latents are."""
    keys, values = normal(num_heads, sizes.nope, sizes.rank), normal(num_heads, sizes.value, sizes.rank)
    return LatentUp(keys * sizes.rank**-0.5, values * sizes.rank**-0.5)


def _tables(case: AttentionCase, block_size: int, generator: torch.Generator) -> tuple[list[int], Tensor, int]:
    counts = [-(-n // block_size) for n in case.seq_lens]
    held = [count + case.blocks_ahead if count else 0 for count in counts]
    num_blocks = sum(held) + 2
    blocks = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    rows = (torch.randperm(len(counts), generator=generator) + 1).tolist()
    rows = [row if count else NULL_ROW for row, count in zip(rows, counts, strict=True)]
    table = torch.zeros((len(counts) + 1, max(held) + 3), dtype=torch.int32)  # null behind a request's last block
    for row, count in zip(rows, held, strict=True):
        table[row, :count] = torch.tensor([next(blocks) for _ in range(count)], dtype=torch.int32)
    return rows, table, num_blocks


def _slots(blocks: Tensor, first: int, last: int, block_size: int) -> Tensor:
    positions = torch.arange(first, last)
    return blocks.long()[positions // block_size] * block_size + positions % block_size


def batch_of(case: AttentionCase, block_size: int, rows: list[int], table: Tensor) -> InputBatch:
    """The step of a case on the host. rows: req_idx of each request; table [rows, blocks] int32, by req_idx."""
    spans = list(zip(rows, case.computed, case.seq_lens, strict=True))
    slots = [_slots(table[row], first, last, block_size) for row, first, last in spans]
    slots.append(torch.arange(sum(case.scheduled), case.num_tokens) % block_size)
    positions = [torch.arange(first, last) for _, first, last in spans] + [torch.zeros(case.padding_tokens).long()]
    ends = np.cumsum((0, *case.scheduled))
    samples = np.flatnonzero(np.array(case.scheduled) > 0)
    return InputBatch(
        input_ids=torch.zeros(case.num_tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        idx_mapping=torch.tensor(rows, dtype=torch.int64),
        logits_indices=torch.from_numpy(ends[1:][samples] - 1),
        expanded_idx_mapping=torch.tensor(rows, dtype=torch.int64)[samples],
        draft_offset=torch.zeros(len(samples), dtype=torch.int32),
        slot_mapping=(torch.cat(slots),),
        block_table=(table,),
        rows_np=np.array(rows, np.int32),
        num_scheduled_tokens_np=np.array(case.scheduled, np.int32),
        logits_rows_np=samples.astype(np.int32),
        seq_lens_max_np=np.array(case.seq_lens, np.int32),
    )


def reference(built: BuiltCase, scale: float) -> Tensor:
    """[T, Hq, D] float64: softmax over the keys each query may read, one query at a time; 0 for padding tokens."""
    case, start = built.case, 0
    width = case.head_dim if case.latent is None else case.latent.value
    out = torch.zeros((*built.q.shape[:2], width), dtype=torch.float64)
    for past, computed, scheduled in zip(built.past, case.computed, case.scheduled, strict=True):
        end = start + scheduled
        keys, values = _expanded(
            built, *(torch.cat((a, b[start:end])).double() for a, b in zip(past, (built.k, built.v), strict=True))
        )
        for i in range(scheduled):
            last = computed + i + 1
            first = max(0, last - case.window) if case.window else 0
            scores = torch.einsum("hd,lhd->hl", built.q[start + i].double(), keys[first:last]) * scale
            out[start + i] = torch.einsum("hl,lhd->hd", _weights(built, scores), values[first:last])
        start = end
    return out


def _expanded(built: BuiltCase, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of each query head, [L, Hq, D], of what is kept of L tokens."""
    case, up = built.case, built.up
    if case.latent is None or up is None:
        group = case.num_heads // case.num_kv_heads
        return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    latent, rotated = keys.split((case.latent.rank, case.latent.rope), dim=2)
    nope = torch.einsum("lr,hdr->lhd", latent[:, 0], up.keys.double())
    shared = rotated.expand(-1, case.num_heads, -1)
    return torch.cat((nope, shared), dim=2), torch.einsum("lr,hdr->lhd", latent[:, 0], up.values.double())


def _weights(built: BuiltCase, scores: Tensor) -> Tensor:
    """Softmax of scores [Hq, L], behind the soft cap and with a sink in the denominator."""
    if built.case.softcap is not None:
        scores = built.case.softcap * torch.tanh(scores / built.case.softcap)
    if built.sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, built.sinks.double()[:, None]), dim=1).softmax(-1)[:, :-1]
