"""A step's requests on the host as latent attention looks at them: lengths, blocks, and which form serves each best.

Arithmetic once a step, no KV touched. Called by `mla_torch`; the products themselves are in `latent_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from framework.batch import NULL_BLOCK, InputBatch
from framework_attention.spans import Ints, Limits, Span, fresh_blocks, plan_spans


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of one latent layer: heads, the latent and the rotated key kept of a token, and what a head has of each.

    nope, value  of a head's expanded key that is not rotated, and of its value
    """

    heads: int
    rank: int
    rope: int
    nope: int
    value: int

    @property
    def kept(self) -> int:
        """Values kept of a token."""
        return self.rank + self.rope

    @property
    def key(self) -> int:
        """Of a head's query."""
        return self.nope + self.rope


@dataclass(frozen=True, slots=True)
class StepRows:
    """Requests of a step, padding included.

    starts      [R] first token of each in the batch
    query_lens  [R] tokens that it computes in this step
    seq_lens    [R] readable context, those included; 0 for padding
    tables      [R, max_blocks] physical blocks, null behind the last one that is written
    """

    starts: Ints
    query_lens: Ints
    seq_lens: Ints
    tables: Ints

    @classmethod
    def of(cls, batch: InputBatch, group: int, block_size: int) -> StepRows:
        """Reads lengths and tables of the batch on the host, where they are."""
        rows = batch.rows_np
        seq_lens = batch.seq_lens.numpy()[: len(rows)].astype(np.int64)
        starts = batch.query_start_loc.numpy()[: len(rows)].astype(np.int64)
        num_blocks = -(-seq_lens // block_size)
        columns = np.arange(num_blocks.max(initial=1))
        tables = batch.block_table[group].numpy()[rows, : len(columns)].astype(np.int64)
        # Blocks of a prompt that later steps compute hold whatever a former owner left in them, NaN included.
        tables[columns >= num_blocks[:, None]] = NULL_BLOCK
        return cls(starts, batch.num_scheduled_tokens_np.astype(np.int64), seq_lens, tables)

    def pick(self, rows: Ints) -> StepRows:
        """Some of the requests, their tokens side by side in their order."""
        only = self._only(rows)
        return replace(only, starts=np.cumsum(only.query_lens) - only.query_lens)

    def parts(self, most: int) -> Iterator[StepRows]:
        """The requests in parts of one product or more each: decodes of about one length, up to `most` keys together
        unless one alone has more, and behind them all those of several tokens."""
        decodes = np.flatnonzero(self.query_lens == 1)
        decodes = decodes[np.argsort(-self.seq_lens[decodes], kind="stable")]
        while len(decodes):
            count = max(1, most // int(self.seq_lens[decodes[0]]))
            yield self._only(np.sort(decodes[:count]))
            decodes = decodes[count:]
        if len(others := np.flatnonzero(self.query_lens > 1)):
            yield self._only(others)

    def _only(self, rows: Ints) -> StepRows:
        """Some of the requests, where they are."""
        return StepRows(self.starts[rows], self.query_lens[rows], self.seq_lens[rows], self.tables[rows])

    def spans(self, limits: Limits) -> list[Span]:
        """Products that cover every token of these requests."""
        return plan_spans(self.starts, self.query_lens, self.seq_lens, self.tables, limits)

    def tokens(self, rows: Ints) -> Ints:
        """Where the tokens of some requests stand in the batch, in the order of `pick`."""
        counts = self.query_lens[rows]
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.starts[rows], counts) + places

    def fresh_blocks(self, block_size: int) -> Tensor | None:
        """As `spans.fresh_blocks`."""
        return fresh_blocks(self.query_lens, self.seq_lens, self.tables, block_size)


def is_cheaper_expanded(query_lens: Ints, seq_lens: Ints, widths: Widths) -> NDArray[np.bool_]:
    """[R] whether expanding every key of the context costs fewer products than absorbing, for each request.

    Per head, expanding costs rank * (nope + value) a key of the context; absorbed scores and values cost 2 rank + rope
    a pair of query and key, expanded ones nope + rope + value. A step's own tokens cost the same in either form.
    """
    context = seq_lens - query_lens
    saved_a_pair = 2 * widths.rank - widths.nope - widths.value
    saved = query_lens * (context + query_lens / 2) * saved_a_pair
    return (query_lens > 1) & (saved > context * widths.rank * (widths.nope + widths.value))
