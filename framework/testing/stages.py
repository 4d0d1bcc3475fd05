"""The contract suite of sampler stages: what every stage must do, whoever wrote it, in checks that need no model.

A `StageCase` says how to build the stage and which parameters want it; each function of `CHECKS` takes a case and
raises AssertionError, naming the stage, when a duty of `framework.interfaces.SamplerStage` is broken. Called by tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.deployed import Deployed
from framework.sampling.groups import best
from framework.sampling.interval import inside, open_interval
from framework.sampling.pipeline import SamplerPipeline
from framework.worker.pooled_column import PooledColumn

VOCAB_SIZE = 300  # not a multiple of 128: the last group is short
NUM_ROWS = 9
MAX_LEN = 64


@dataclass(frozen=True)
class StageCase:
    """wanting: parameters that use the stage, at least two different ones; plain: parameters that do not.

    Among the plain ones is a greedy request by default: nothing is drawn for it, whatever else it asks for.
    """

    target: Any
    wanting: tuple[SamplingParams, ...]
    plain: tuple[SamplingParams, ...] = (SamplingParams(), SamplingParams(temperature=0))
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.spec.name)


class HostColumn:
    """A declared field outside of an engine: the host mirror and the tensor share their memory."""

    def __init__(self, declared: Field, num_rows: int):
        shape = (num_rows,) if declared.width == 1 else (num_rows, declared.width)
        self.np: NDArray[Any] = np.full(shape, declared.init, declared.dtype)
        shared = self.np.view(np.int64) if declared.dtype == "uint64" else self.np
        self.dev = torch.from_numpy(shared)


def context(spec: StageSpec, vocab_size: int = VOCAB_SIZE, num_rows: int = NUM_ROWS) -> StageContext:
    """A StageContext over host columns, for stages and pipelines that run outside of an engine."""
    device = torch.get_default_device()
    columns = {f.name: _column(f.sized(vocab_size), num_rows) for f in spec.fields}
    token_ids = torch.zeros(num_rows, MAX_LEN, dtype=torch.int32)
    return StageContext(device, vocab_size, num_rows, num_rows, (), columns.__getitem__, token_ids)


def _column(declared: Field, num_rows: int) -> Any:
    if not declared.pooled:
        return HostColumn(declared, num_rows)
    slots = HostColumn(Field(declared.name, "int32"), num_rows)
    return HostPool(declared, slots, getattr(torch, declared.dtype), torch.get_default_device())


class HostPool(PooledColumn):
    """A pooled field outside of an engine: a place is on its device as soon as it is filled in."""

    def take(self, req_idx: int) -> NDArray[Any]:
        super().take(req_idx)
        self.apply()
        filled: NDArray[Any] = self.dev[int(self.slot[req_idx])].numpy()
        return filled


def new_request(req_idx: int, params: SamplingParams, seed: int = 0) -> NewRequest:
    """A request of three prompt tokens."""
    return NewRequest(req_idx, f"request-{req_idx}", np.array([1, 2, 3], np.int32), 3, 0, params, seed)


def make_rows(
    req_idx: Sequence[int], seeds: Sequence[int] | None = None, positions: Sequence[int] | None = None
) -> Rows:
    """Logits rows of these table rows without drafts; a row's seed and position follow from its req_idx by default."""
    seeds = [1000 + i for i in req_idx] if seeds is None else seeds
    positions = [3 + i for i in req_idx] if positions is None else positions
    count = len(req_idx)
    return Rows(
        req_idx=torch.tensor(req_idx, dtype=torch.int64),
        offset=torch.zeros(count, dtype=torch.int32),
        position=torch.tensor(positions, dtype=torch.int64),
        seed=torch.tensor(seeds, dtype=torch.int64),
        drafts=torch.zeros(count, 0, dtype=torch.int64),
        num_drafts=torch.zeros(count, dtype=torch.int32),
        req_idx_np=np.array(req_idx, np.int32),
    )


class _Bench:
    """One stage over a small table, driven as a pipeline drives it."""

    def __init__(self, case: StageCase):
        self.spec: StageSpec = case.target.spec
        self.ctx = context(self.spec)
        self.stage = case.target(case.options, self.ctx)
        self.deployed = Deployed(self.spec.name, self.spec, self.stage, self.ctx, 1)

    def add(self, req_idx: int, params: SamplingParams) -> None:
        if self.stage.wants(params):
            self.stage.add_request(req_idx, params, new_request(req_idx, params))
        else:
            self.deployed.reset_row(req_idx)

    def commit(self, rows: Rows, token: int = 5) -> None:
        """Tells the stage that each row took `token`."""
        count = len(rows.req_idx)
        self.stage.commit(rows, torch.full((count, 1), token), torch.ones(count, dtype=torch.int32))

    def run(self, logits: Tensor, rows: Rows, narrow: bool = False) -> Tensor:
        """What the stage makes of the rows, one result a row; arguments are copied first."""
        logits = logits.clone()
        if self.spec.kind in ("mask", "elementwise"):
            self.stage.apply(logits, rows)
            return logits
        lo, hi = _narrow(logits) if narrow else open_interval(len(logits), logits.device)
        if self.spec.kind == "threshold":
            return torch.stack(self.stage.bounds(logits, rows, lo, hi), 1)
        if self.spec.kind == "select":
            chosen: Tensor = self.stage.select(logits, rows, lo, hi)
            return chosen
        self.stage.observe(logits, logits, rows, best(logits)[1])
        return logits


def _narrow(logits: Tensor) -> tuple[Tensor, Tensor]:
    """An interval that leaves out the best tokens and the worst."""
    values = logits.sort(-1, descending=True).values
    return values[:, 150].clone(), values[:, 5].clone()


def _logits(count: int) -> Tensor:
    """[count, V] with equal logits, masked tokens and a flat row."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(count, VOCAB_SIZE, generator=generator) * 3
    logits[:, 10] = logits[:, 200] = logits.amax(-1)
    logits[:, 20:40] = float("-inf")
    logits[count - 1] = 0.5
    return logits


def _filled(case: StageCase) -> tuple[_Bench, list[int], list[int]]:
    """(bench, table rows that want the stage, rows that do not), mixed over rows 1 to 8."""
    bench = _Bench(case)
    wanting, plain = [1, 3, 4, 6, 8], [2, 5, 7]
    for place, row in enumerate(wanting):
        bench.add(row, case.wanting[place % len(case.wanting)])
    for place, row in enumerate(plain):
        bench.add(row, case.plain[place % len(case.plain)])
    return bench, wanting, plain


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.is_floating_point():
        a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    return torch.equal(a, b)


def check_wants_and_validate(case: StageCase) -> None:
    """`wants` and `validate` tell the case's parameters apart; a case that does not is no case."""
    stage = _Bench(case).stage
    for params in case.wanting:
        assert stage.wants(params), f"{case.name}: does not want {params}, which its case says it does"
        stage.validate(params)
        undeclared = set((params.extra_args or {}).get(case.name, ())) - set(case.target.spec.extra_args)
        assert not undeclared, (
            f"{case.name}: StageSpec.extra_args lacks {sorted(undeclared)}, so admission refuses them"
        )
    if case.target.spec.kind != "select":
        for params in case.plain:
            assert not stage.wants(params), f"{case.name}: wants {params}, so every request pays for it"


def check_reused_row_keeps_nothing(case: StageCase) -> None:
    """A row that served one request gives the next one exactly what a fresh row gives."""
    logits, rows = _logits(1), make_rows([1])
    for after in (*case.wanting, *case.plain):
        fresh, used = _Bench(case), _Bench(case)
        for before in case.wanting:
            used.add(1, before)
            used.run(logits, rows)
            used.commit(rows)
        fresh.add(1, after)
        used.add(1, after)
        for one in fresh.spec.fields:
            new, old = (bench.ctx.column(one.name).np[1] for bench in (fresh, used))
            assert np.array_equal(new, old), f"{case.name}: field '{one.name}' keeps an old value"
        for _ in range(2):  # the second time with what the first token of the row has left
            assert _same(fresh.run(logits, rows), used.run(logits, rows)), f"{case.name}: a reused row keeps something"
            fresh.commit(rows, 7)
            used.commit(rows, 7)


def check_shuffled_batch(case: StageCase) -> None:
    """Permuting the rows of a batch permutes the results, bit for bit, under open and narrow intervals."""
    bench, _, _ = _filled(case)
    req_idx, order = list(range(1, NUM_ROWS)), [5, 2, 7, 0, 3, 6, 1, 4]
    logits = _logits(len(req_idx))
    for narrow in (False, True):
        straight = bench.run(logits, make_rows(req_idx), narrow)
        shuffled = bench.run(logits[order], make_rows([req_idx[i] for i in order]), narrow)
        assert _same(straight[order], shuffled), f"{case.name}: results follow the place in the batch, not the row"


def check_neighbours_change_nothing(case: StageCase) -> None:
    """A row alone gives, bit for bit, what it gives among others, even when a neighbour's logits are no numbers."""
    bench, _, _ = _filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits = _logits(len(req_idx))
    together = bench.run(logits, make_rows(req_idx))
    broken = logits.clone()
    broken[2], broken[5] = float("-inf"), float("nan")
    beside = bench.run(broken, make_rows(req_idx))
    for place, row in enumerate(req_idx):
        alone = bench.run(logits[place : place + 1], make_rows([row]))
        assert _same(alone, together[place : place + 1]), f"{case.name}: a neighbour changes row {row}"
        if place not in (2, 5):
            assert _same(alone, beside[place : place + 1]), f"{case.name}: a faulty neighbour changes row {row}"


def check_plain_rows_pass_unchanged(case: StageCase) -> None:
    """Rows that do not want the stage leave it bit-equal, after a commit too; so does a table of neutral values."""
    if case.target.spec.kind == "select":
        return
    bench, _, plain = _filled(case)
    for one, req_idx in ((bench, plain), (_Bench(case), list(range(NUM_ROWS)))):
        logits, rows = _logits(len(req_idx)), make_rows(req_idx)
        for narrow in (False, True):
            before = logits
            if bench.spec.kind == "threshold":
                before = torch.stack(_narrow(logits) if narrow else open_interval(len(logits), logits.device), 1)
            assert _same(one.run(logits, rows, narrow), before), f"{case.name}: changes a row that did not want it"
            one.commit(rows)  # neighbours want the stage, so that it hears of these rows as well


def check_second_call_is_equal(case: StageCase) -> None:
    """A step changes no state before `commit`, and a stage writes only into what its kind may change."""
    bench, _, _ = _filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits, rows = _logits(len(req_idx)), make_rows(req_idx)
    assert _same(bench.run(logits, rows), bench.run(logits, rows)), f"{case.name}: a second call gives another result"
    if bench.spec.kind in ("threshold", "select"):
        own, (lo, hi) = logits.clone(), _narrow(logits)
        lo_before, hi_before = lo.clone(), hi.clone()
        call = bench.stage.bounds if bench.spec.kind == "threshold" else bench.stage.select
        call(own, rows, lo, hi)
        assert _same(own, logits), f"{case.name}: writes into the logits, which a {bench.spec.kind} stage must not"
        assert _same(lo, lo_before) and _same(hi, hi_before), f"{case.name}: writes into the interval it was given"


def check_kept_set(case: StageCase) -> None:
    """Nothing masked or outside of the interval comes back, and no row that has a token loses its last one."""
    bench, _, _ = _filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits, rows = _logits(len(req_idx)), make_rows(req_idx)
    if bench.spec.kind in ("mask", "elementwise") and bench.deployed.keeps("kept_set"):
        out = bench.run(logits, rows)
        assert bool((out[logits == -torch.inf] == -torch.inf).all()), f"{case.name}: lets a masked token in"
    lo, hi = _narrow(logits)
    if bench.spec.kind == "threshold":
        new_lo, new_hi = bench.run(logits, rows, narrow=True).unbind(1)
        assert bool((new_lo >= lo).all() and (new_hi <= hi).all()), f"{case.name}: widens the interval"
        kept = (inside(logits, new_lo, new_hi) > -torch.inf).sum(-1)
        assert bool((kept > 0).all()), f"{case.name}: empties a row"
    if bench.spec.kind == "select":
        picked = logits.gather(1, bench.run(logits, rows, narrow=True).unsqueeze(1)).squeeze(1)
        assert bool(((picked >= lo) & (picked <= hi)).all()), f"{case.name}: picks a token outside of the interval"


def check_argmax(case: StageCase) -> None:
    """A stage that declares to keep `argmax` leaves the best token the best."""
    bench, _, _ = _filled(case)
    if not bench.deployed.keeps("argmax"):
        return
    req_idx = list(range(1, NUM_ROWS))
    logits, rows = _logits(len(req_idx)), make_rows(req_idx)
    top, ids = best(logits)
    out = bench.run(logits, rows)
    if bench.spec.kind == "select":
        kept = out == ids
    elif bench.spec.kind == "threshold":
        kept = (out[:, 0] <= top) & (top <= out[:, 1])
    else:
        kept = out.gather(1, ids.unsqueeze(1)).squeeze(1) == out.amax(-1)
    assert bool(kept.all()), f"{case.name}: declares to keep argmax and does not"


def check_unused_stage_costs_nothing(case: StageCase) -> None:
    """A pipeline whose rows do not want the stage does not call it in a step."""
    if case.target.spec.kind == "select":
        return
    bench = _Bench(case)
    counted = _Counted(bench.stage)
    ctx = context(_AnyToken.spec)
    ours = Deployed(bench.spec.name, bench.spec, counted, bench.ctx, 1)
    pipeline = SamplerPipeline("check", (ours, Deployed("any", _AnyToken.spec, _AnyToken({}, ctx), ctx, 2)))
    for row in (1, 2):
        params = case.plain[row % len(case.plain)]
        pipeline.add_request(row, params, new_request(row, params))
    for wanted in (False, True):  # the second round shows that the count is not blind
        counted.calls.clear()
        rows = make_rows([1, 2])
        result = pipeline.sample(_logits(2), rows)
        pipeline.commit(rows, result.ids.unsqueeze(1), torch.ones(2, dtype=torch.int32))
        assert bool(counted.calls) == wanted, (
            f"{case.name}: called {counted.calls} in a step whose rows want it: {wanted}"
        )
        pipeline.add_request(1, case.wanting[0], new_request(1, case.wanting[0]))


class _Counted:
    """A stage that notes which of its methods a step calls."""

    def __init__(self, stage: Any):
        self.spec = stage.spec
        self.calls: list[str] = []
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        if name in ("apply", "bounds", "observe", "commit"):
            self.calls.append(name)
        return getattr(self._stage, name)


class _AnyToken:
    """The smallest select stage that is not greedy in the pipeline's eyes."""

    spec: ClassVar[StageSpec] = StageSpec("any", kind="select", caps=Capabilities(keeps=frozenset({"kept_set"})))

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        """Keeps nothing."""

    def wants(self, params: SamplingParams) -> bool:
        return True

    def validate(self, params: SamplingParams) -> None:
        """Everything is fine with it."""

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        """A row keeps nothing."""

    def select(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> Tensor:
        return best(inside(logits, lo, hi))[1]

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""


CHECKS = (
    check_wants_and_validate,
    check_reused_row_keeps_nothing,
    check_shuffled_batch,
    check_neighbours_change_nothing,
    check_plain_rows_pass_unchanged,
    check_second_call_is_equal,
    check_kept_set,
    check_argmax,
    check_unused_stage_costs_nothing,
)


def check_stage(case: StageCase) -> None:
    """Runs every check on the case."""
    for check in CHECKS:
        check(case)
