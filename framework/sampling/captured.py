"""The sampler of a step that is captured once and runs again for others: what it does follows from no host value.

Every stage of a captured step runs for every row, and a row that does not want one holds neutral values. Which stages
those are is a `Variant`; the runner asks for the one that a step needs, and captures what is missing. Steps that cannot
be captured are sampled by the pipeline as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.request import SamplingParams
from framework.sampling.fused import OF_ONE_STEP
from framework.sampling.logprobs import FEW_BEST
from framework.sampling.sampled import DRAWS, LOGPROBS, SampleResult, union_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import Rows
    from framework.interfaces import SamplerOps
    from framework.sampling.deployed import Deployed
    from framework.sampling.fused import FusedSampler
    from framework.sampling.logprobs import Asked

NUM_TOP = (0, 5, 10, 20, 40, FEW_BEST)
"""Numbers of best tokens that captured steps tell: a step whose rows ask for fewer takes the next one."""
MAX_SETS = 4
"""Sets of stages that run by themselves, the first that were needed beside the plain one. A backend may compile for
each of them, which takes seconds: any further set is served by one that holds every stage."""

_LIKELY: tuple[dict[str, Any], ...] = ({"top_k": 50, "top_p": 0.9}, {"presence_penalty": 0.5})


@dataclass(frozen=True, slots=True)
class Variant:
    """What the sampler of a captured step does.

    bits     of the stages that run, and `DRAWS` where a row may draw
    num_top  best tokens of each row that are told with its logprobs, None for no logprobs
    pools    addresses of the stages' pooled memory: when a pool has grown, what was captured reads where it was
    """

    bits: int
    num_top: int | None
    pools: tuple[int, ...] = ()


class CapturedSampler:
    """Of one pipeline on a backend with `SamplerOps`.

    bits        [rows] feature bits of each request, the pipeline's own array
    bits_of     those of a request with these parameters
    """

    def __init__(
        self,
        stages: Sequence[Deployed],
        fused: FusedSampler,
        ops: SamplerOps,
        asked: Asked,
        bits: NDArray[np.uint64],
        bits_of: Callable[[SamplingParams], int],
    ) -> None:
        self._stages, self._fused, self._asked, self._bits = stages, fused, asked, bits
        self._pooling = [s for s in stages if any(field.pooled for field in s.spec.fields)]
        self._sets: list[int] = []
        self._possible = _bits(s for s in stages if _may_be_captured(s, ops))
        (select,) = (s for s in stages if s.spec.kind == "select")
        if not select.bit & self._possible or select.spec.fused not in ops.fuses:
            self._possible = 0
        self._bits_of = bits_of
        self._plain = bits_of(SamplingParams(temperature=0.5))
        # What any set holds: a multiplication a logit where nobody asks for a temperature, and fewer sets.
        self._common = 0 if self._plain & ~(self._possible | DRAWS) else self._plain

    def rounded(self, bits: int) -> int:
        """The set of stages that serves one with these bits, of few; bits that no captured step serves stay as they
        are."""
        if not self._possible or bits & ~(self._possible | DRAWS):
            return bits
        bits |= self._common
        if bits == self._plain:
            return bits
        if bits not in self._sets:
            if len(self._sets) == MAX_SETS:
                return self._possible | DRAWS
            self._sets.append(bits)
        return bits

    def variant(self, req_idx: NDArray[np.int32]) -> Variant | None:
        """What a step of these rows has to do; None for rows that the pipeline samples itself."""
        bits = union_of(self._bits[req_idx])
        num_top = None
        if bits & LOGPROBS:
            most = None if self._asked.is_processed else self._asked.num_top(req_idx)
            if most is None:
                return None
            num_top = next(n for n in NUM_TOP if n >= most)
        return self._variant(self.rounded(bits & ~LOGPROBS), num_top)

    def plain(self) -> Variant | None:
        """That of rows which draw at some temperature, greedy ones among them."""
        return self._variant(self._plain, None)

    def likely(self) -> list[Variant]:
        """Those of rows with thresholds, with penalties and with logprobs, as far as they are not the plain one."""
        bits = [self._bits_of(SamplingParams(temperature=0.5, **want)) for want in _LIKELY]
        top = None if self._asked.is_processed else self._variant(self._plain, NUM_TOP[1])
        found = dict.fromkeys([*(self._variant(one, None) for one in bits), top])
        return [one for one in found if one is not None and one != self.plain()]

    def stages(self, bits: int) -> list[Deployed]:
        """Those of a set, in pipeline order."""
        return [one for one in self._stages if one.bit & bits]

    def is_current(self, variant: Variant) -> bool:
        """Whether the pools are where they were when the variant was asked for."""
        return self._variant(variant.bits, variant.num_top) == variant

    def _variant(self, bits: int, num_top: int | None) -> Variant | None:
        if not self._possible or bits & ~(self._possible | DRAWS):
            return None
        pools = [s.ctx.column(f.name) for s in self._pooling if s.bit & bits for f in s.spec.fields if f.pooled]
        return Variant(bits, num_top, tuple([pool.dev.data_ptr() for pool in pools]))

    def sample(self, logits: Tensor, rows: Rows, variant: Variant) -> SampleResult:
        """Tokens and numbers of every row of logits [L, V]."""
        choice = self._fused.choose(logits, rows, self.stages(variant.bits))
        assert choice is not None, variant
        result = SampleResult(choice.ids, choice.told, choice.top, choice.value, rows.req_idx_np)
        if variant.num_top is not None:
            result.logprobs = self._asked.measure_all(logits, choice.ids, variant.num_top)
        return result

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor, variant: Variant) -> None:
        """Tells the variant's stages what every row has drawn. sampled [R, k + 1], num_valid [R]."""
        for one in self.stages(variant.bits):
            one.stage.commit(rows, sampled, num_valid)

    def wanting(self, req_idx: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
        """(rows that want logprobs, the most best tokens that one of them wants)."""
        rows = (self._bits[req_idx] & np.uint64(LOGPROBS)).nonzero()[0]
        return rows, self._asked.num_top(req_idx[rows]) or 0


def _bits(stages: Iterable[Deployed]) -> int:
    return sum({one.bit for one in stages})


def _may_be_captured(one: Deployed, ops: SamplerOps) -> bool:
    """As an operation of the backend, or by its own method; not with operands that come with a step."""
    if one.spec.kind == "observe" or one.spec.fused in OF_ONE_STEP:
        return False
    is_fused = one.spec.fused in ops.fuses and one.keeps("kept_set")
    return is_fused or one.keeps("graph_safe")
