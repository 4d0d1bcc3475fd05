"""The sampler: ordered stages that turn a step's logits into tokens, whatever the stages are.

Knows kinds of stages and no stage by name; what a stage does is in its plugin. The runner calls `add_request` at
admission and `sample`, `commit`, `collect` in a step; admission calls `validate`.

    masks and elementwise stages -> greedy rows are decided -> temperature and the like -> thresholds -> select
    `------- every row -------'                                `------------- the other rows -------------'

The line between the two halves is drawn behind the last stage that may change which token is best (caps `argmax`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from framework.errors import ConfigError, StageError, shown
from framework.sampling.admission import active_stages, check_request
from framework.sampling.capabilities import check_composition
from framework.sampling.captured import CapturedSampler
from framework.sampling.deployed import Deployed, deploy
from framework.sampling.fused import FusedSampler
from framework.sampling.groups import best
from framework.sampling.interval import inside, open_interval
from framework.sampling.lasting import LastingState
from framework.sampling.logprobs import Asked, to_host
from framework.sampling.prompt_logprobs import PromptLogprobs
from framework.sampling.sampled import DRAWS, LOGPROBS, SampleResult, union_of
from framework.sent import sent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from framework.batch import LogprobsColumns, NewRequest, Rows
    from framework.config import SamplerConfig
    from framework.interfaces import SamplerOps
    from framework.plugins import Registry
    from framework.request import SamplingParams
    from framework.sampling.deployed import ContextFactory

IN_PLACE = ("mask", "elementwise")
MAX_STAGES = 62


@dataclass(slots=True)
class _Plan:
    """What the step's rows want, decided on the host.

    random  rows that are not greedy; wanting: rows with logprobs; tells_processed: of the processed logits, not the raw
    """

    bits: int
    random: NDArray[np.int64] | None
    wanting: NDArray[np.int64] | None
    tells_processed: bool


class SamplerPipeline:
    """Stages in pipeline order, with the per-row host state that decides which of them a step runs."""

    def __init__(
        self,
        name: str,
        stages: Sequence[Deployed],
        logprobs_mode: str = "raw_logprobs",
        ops: SamplerOps | None = None,
    ):
        self.name, self.stages = name, tuple(stages)
        (self._select,) = (s for s in stages if s.spec.kind == "select")
        self._all_greedy = self._select.keeps("argmax")
        in_place = [s for s in stages if s.spec.kind in IN_PLACE]
        split = max((i + 1 for i, s in enumerate(in_place) if not s.keeps("argmax")), default=0)
        self._shared, self._reshaping = in_place[:split], in_place[split:]
        first_mask = next((i for i, s in enumerate(in_place) if s.spec.kind == "mask"), len(in_place))
        self._open = {s.key for s in in_place[first_mask + 1 :] if not s.keeps("kept_set")}
        self._thresholds = [s for s in stages if s.spec.kind == "threshold"]
        self._observers = [s for s in stages if s.spec.kind == "observe"]
        self._pooling = [s for s in stages if any(field.pooled for field in s.spec.fields)]
        self._lasting = LastingState(stages)
        ctx = self._select.ctx
        self._vocab_size = ctx.vocab_size
        self._bits = np.zeros(ctx.num_rows, np.uint64)
        self._asked = Asked(logprobs_mode, ctx.vocab_size, ctx.num_rows, ops)
        self._fused = None if ops is None else FusedSampler(ops, self._apply)
        self.captured = self._captured(ops)
        self._rounds = ops is not None and ops.compiles

    def _captured(self, ops: SamplerOps | None) -> CapturedSampler | None:
        if ops is None or self._fused is None:
            return None
        return CapturedSampler(self.stages, self._fused, ops, self._asked, self._bits, self._bits_of)

    def prompt_logprobs(self, compute_logits: Callable[[Tensor], Tensor]) -> PromptLogprobs:
        """Logprobs of prompts, or logits in the modes that tell logits; for one runner."""
        return PromptLogprobs(compute_logits, self._vocab_size, is_log=self._asked.is_log)

    # ------------------------------------------------------------------------------------------- admission

    def validate(self, params: SamplingParams) -> None:
        """RequestError or NotBuiltError when a parameter that the caller named cannot be served; nothing is ignored."""
        check_request(self.name, self.stages, self._vocab_size, params)

    def add_request(self, req_idx: int, params: SamplingParams, new: NewRequest) -> None:
        """Overwrites the row in every stage: the request's values where it wants the stage, else neutral ones."""
        bits = self._own_bits(params)
        wanted = self._wanted(params)
        for one in self.stages:
            if one in wanted:
                bits |= one.bit
                one.stage.add_request(req_idx, one.view(params), new)
            else:
                one.reset_row(req_idx)
        self._bits[req_idx] = bits
        self._lasting.add(new)
        self._asked.add(req_idx, params)

    def rows_applied(self) -> None:
        """The rows of requests that were added are on the device."""
        self._lasting.give_back()

    def preempt(self, req_idx: int) -> None:
        """The request of the row will come back; `release` follows."""
        self._lasting.preempt(req_idx)

    def release(self, req_idx: int) -> None:
        """The request of the row has left: pools have its place back."""
        self._lasting.release(req_idx)
        self._asked.release(req_idx)
        for one in self._pooling:
            one.release(req_idx)

    def _bits_of(self, params: SamplingParams) -> int:
        return sum({self._own_bits(params), *(one.bit for one in self._wanted(params))})

    def _own_bits(self, params: SamplingParams) -> int:
        draws = 0 if params.is_greedy or self._all_greedy else DRAWS
        return draws | (LOGPROBS if params.asks_logprobs else 0)

    def _wanted(self, params: SamplingParams) -> list[Deployed]:
        """Stages that the request uses; a greedy row is decided before those that only reshape its distribution."""
        skipped: tuple[Deployed, ...] = ()
        if params.is_greedy or self._all_greedy:
            skipped = (*self._reshaping, *self._thresholds)
        return [s for s in active_stages(self.stages, params) if s not in skipped and s.stage.wants(s.view(params))]

    def uses(self, key: str, params: SamplingParams) -> bool:
        """Whether the stage runs for a request with these parameters."""
        try:
            return any(one.key == key for one in self._wanted(params))
        except StageError as error:  # of `wants`: the stage that cannot say so counts
            return error.stage == key

    # -------------------------------------------------------------------------------------------- one step

    def sample(self, logits: Tensor, rows: Rows) -> SampleResult:
        """Chooses a token for each row of logits [L, V]; float32 ones may be overwritten. Waits for nothing."""
        plan = self._plan(rows)
        if self._fused is not None and (fused := self._sample_fused(self._fused, logits, rows, plan)) is not None:
            return fused
        observers = self._running(self._observers, plan)
        raw, asked = self._keep_raw(logits, plan, bool(observers))
        work = logits.float()
        self._apply(self._running(self._shared, plan), work, rows)
        top, ids = best(work)
        chosen, processed = top, work
        if self._all_greedy:
            ids = self._select.stage.select(work, rows, *open_interval(len(work), work.device))
            chosen = work.gather(1, ids.unsqueeze(1)).squeeze(1)
        if plan.random is not None:
            ids, chosen, processed = self._draw(work, rows, plan, ids, chosen, bool(observers) or plan.tells_processed)
        finite = top.isfinite() if chosen is top else top.isfinite() & chosen.isfinite()
        result = SampleResult(ids, ids.where(finite, -1), top, chosen, rows.req_idx_np)
        if plan.wanting is not None:
            told = _select(processed, plan.wanting) if plan.tells_processed else asked
            req_idx = rows.req_idx_np[plan.wanting]
            result.logprobs = self._asked.measure(told, _select(ids, plan.wanting), plan.wanting, req_idx)
        for one in observers:
            result.payloads[one.key] = one.stage.observe(raw, processed, rows, ids)
        return result

    def _sample_fused(self, fused: FusedSampler, logits: Tensor, rows: Rows, plan: _Plan) -> SampleResult | None:
        """As `sample`, by the backend's own operations; None where somebody wants to see the processed logits."""
        if plan.tells_processed or self._running(self._observers, plan):
            return None
        bits = plan.bits
        if self._rounds and self.captured is not None:
            bits = self.captured.rounded(bits & ~LOGPROBS)
        choice = fused.choose(logits, rows, [s for s in self.stages if s.bit & bits])
        if choice is None:
            return None
        result = SampleResult(choice.ids, choice.told, choice.top, choice.value, rows.req_idx_np)
        if plan.wanting is not None:
            told, ids = _select(logits, plan.wanting), _select(choice.ids, plan.wanting)
            result.logprobs = self._asked.measure(told, ids, plan.wanting, rows.req_idx_np[plan.wanting])
        return result

    def _plan(self, rows: Rows) -> _Plan:
        each = self._bits[rows.req_idx_np]
        bits = union_of(each)
        return _Plan(
            bits=bits,
            random=(each & np.uint64(DRAWS)).nonzero()[0] if bits & DRAWS else None,
            wanting=(each & np.uint64(LOGPROBS)).nonzero()[0] if bits & LOGPROBS else None,
            tells_processed=bool(bits & LOGPROBS) and self._asked.is_processed,
        )

    def _running(self, stages: Sequence[Deployed], plan: _Plan) -> list[Deployed]:
        return [s for s in stages if s.bit & plan.bits]

    def _apply(self, stages: Sequence[Deployed], logits: Tensor, rows: Rows) -> None:
        """Runs in-place stages. What masks have forbidden stays so behind a stage that might let it in."""
        for one in stages:
            masked = logits == -torch.inf if one.key in self._open else None
            one.stage.apply(logits, rows)
            if masked is not None:
                logits.masked_fill_(masked, -torch.inf)

    def _keep_raw(self, logits: Tensor, plan: _Plan, observed: bool) -> tuple[Tensor, Tensor]:
        """(the model's logits for observers, those that logprobs tell), out of reach of in-place stages."""
        overwritten = logits.dtype == torch.float32 and self._running([*self._shared, *self._reshaping], plan)
        raw = logits.clone() if overwritten and observed else logits
        if plan.wanting is None or plan.tells_processed:
            return raw, raw
        if len(plan.wanting) < len(logits):
            return raw, _select(raw, plan.wanting)
        return raw, raw.clone() if overwritten and not observed else raw

    def _draw(
        self, work: Tensor, rows: Rows, plan: _Plan, ids: Tensor, chosen: Tensor, observed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, their logits, processed logits) once the rows that are not greedy are drawn; copies mixed batches."""
        assert plan.random is not None, "no row draws"
        if len(plan.random) == len(work):
            return self._draw_rows(work, rows, plan, observed)
        index = _index(plan.random, work)
        drawn, values, kept = self._draw_rows(work.index_select(0, index), rows.at(index, plan.random), plan, observed)
        processed = work.index_copy(0, index, kept) if observed else work
        return ids.index_copy(0, index, drawn), chosen.index_copy(0, index, values), processed

    def _draw_rows(self, logits: Tensor, rows: Rows, plan: _Plan, observed: bool) -> tuple[Tensor, Tensor, Tensor]:
        self._apply(self._running(self._reshaping, plan), logits, rows)
        lo, hi = open_interval(len(logits), logits.device)
        for one in self._running(self._thresholds, plan):
            lo, hi = one.stage.bounds(logits, rows, lo, hi)
        ids = self._select.stage.select(logits, rows, lo, hi)
        values = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        return ids, values, inside(logits, lo, hi) if observed else logits

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Tells the stages of the step what was accepted. sampled [R, k + 1], num_valid [R], on the device."""
        bits = union_of(self._bits[rows.req_idx_np])
        for one in self.stages:
            if one.bit & bits:
                one.stage.commit(rows, sampled, num_valid)

    # ----------------------------------------------------------------------------------------- on the host

    def collect(self, result: SampleResult) -> tuple[NDArray[np.int32], LogprobsColumns | None, dict[int, str]]:
        """(ids [L], logprobs columns or None, {logits row: what is wrong with it}). Waits for the device."""
        ids = result.told.cpu().numpy().astype(np.int32)
        logprobs = None if result.logprobs is None else to_host(result.logprobs, len(ids))
        told = ids.tolist()
        faults = {row: self._fault(result, row) for row, token in enumerate(told) if token < 0} if min(told) < 0 else {}
        return ids, logprobs, faults

    def collect_payloads(self, result: SampleResult) -> dict[str, Any]:
        """{stage name: payload on the host} of the observe stages that ran, but for those that tell requests."""
        ran = [s for s in self._observers if s.key in result.payloads and not s.spec.tells_requests]
        return {s.key: s.stage.collect(result.payloads[s.key]) for s in ran}

    def collect_told(self, result: SampleResult) -> dict[str, list[Any]]:
        """{stage name: an entry a logits row} of the observe stages that ran and tell requests."""
        ran = [s for s in self._observers if s.key in result.payloads and s.spec.tells_requests]
        return {s.key: self._told(s, result) for s in ran}

    def _told(self, one: Deployed, result: SampleResult) -> list[Any]:
        """Entries of the rows that want the stage, None in the place of the others."""
        told = one.stage.collect(result.payloads[one.key])
        wanting = (self._bits[result.req_idx_np] & np.uint64(one.bit)).tolist()
        if not isinstance(told, list) or len(told) != len(wanting):
            what = f"a list of {len(wanting)} entries, one a logits row, and got {shown(told)}"
            raise StageError(f"sampler stage '{one.key}' tells requests, so its collect must return {what}", one.key)
        return [entry if wants else None for entry, wants in zip(told, wanting, strict=True)]

    def _fault(self, result: SampleResult, row: int) -> str:
        """Why a row cannot be sampled. Runs for faulty rows only."""
        top = float(result.top[row])
        if np.isfinite(top):
            return f"sampler stage '{self._select.key}' picked a token that is masked"
        bits = int(self._bits[result.req_idx_np[row]])
        active = [s for s in self._shared if s.bit & bits]
        masks = [s.key for s in active if s.spec.kind == "mask"] or [s.key for s in active]
        if top == -np.inf and masks:
            return f"no token is left to choose: stages {', '.join(masks)} together mask the whole vocabulary"
        return "the model's logits are not numbers"


def _select(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """[L, ...] -> [n, ...]: the tensor itself where all rows are meant."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, _index(rows, tensor))


def _index(rows: NDArray[np.int64], like: Tensor) -> Tensor:
    return sent(rows, like.device)


def build_pipeline(
    config: SamplerConfig,
    registry: Registry,
    ctx_factory: ContextFactory,
    *,
    required: frozenset[str] = frozenset(),
    provided: frozenset[str] = frozenset(),
    ops: SamplerOps | None = None,
) -> SamplerPipeline:
    """The pipeline of `config.stages`, in their order.

    ctx_factory  (stage key, spec) -> StageContext; it has declared the stage's fields, which may be allocated later
    required, provided  words between engine and stages, see `check_composition`
    ops  operations that the backend fuses, if it has any
    Raises ConfigError for what does not go together, PluginError for a stage that is not there.
    """
    if len(config.stages) > MAX_STAGES:
        raise ConfigError(f"sampler={config.name} has {len(config.stages)} stages; at most {MAX_STAGES} are possible")
    stages = [deploy(stage, i, registry, ctx_factory) for i, stage in enumerate(config.stages)]
    check_composition(stages, required, provided)
    return SamplerPipeline(config.name, stages, config.logprobs_mode, ops)
