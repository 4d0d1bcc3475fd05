"""The contract suite of sampler stages: what every stage must do, whoever wrote it, in checks that need no model.

Each function of `CHECKS` takes a `StageCase` and raises AssertionError, naming the stage, when a duty of
`framework.interfaces.SamplerStage` is broken. Here are the checks of single calls; `stage_courses` has those of whole
requests, `stage_replay` those of captured steps, `stage_engine` those of an engine. Called by `run=check` and by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from framework.batch import NewRequest, Rows
from framework.errors import did_you_mean
from framework.interfaces import Capabilities, StageSpec
from framework.request import SamplingParams
from framework.sampling.deployed import ALWAYS, METHODS, Deployed
from framework.sampling.groups import best
from framework.sampling.interval import inside, open_interval
from framework.sampling.pipeline import SamplerPipeline
from framework.testing.checking import Skipped, assert_all
from framework.testing.stage_bench import (
    NUM_ROWS,
    PROMPT,
    VOCAB_SIZE,
    HostColumn,
    StageBench,
    StageCase,
    beginning,
    context,
    draft_rows,
    filled,
    logits_of,
    make_rows,
    narrow_interval,
    new_request,
    same,
    same_request,
)
from framework.testing.stage_courses import COURSE_CHECKS
from framework.testing.stage_replay import check_captured_step_serves_other_rows

__all__ = [
    "CHECKS", "NUM_ROWS", "VOCAB_SIZE", "HostColumn", "StageCase", "check_stage", "context", "draft_rows", "make_rows",
    "new_request",
]  # fmt: skip

IN_PLACE = ("mask", "elementwise")
WORDS = (
    "argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic", "host_tokens",
    "exact_lens",
)  # fmt: skip
"""Words that `Capabilities` of stages are made of."""
DTYPES = ("float32", "int32", "int64", "uint64", "bool")
"""Of fields."""
JUNK: tuple[Any, ...] = (object(), float("nan"))
"""Values that are no parameter of anything."""


def check_it_is_a_stage(case: StageCase) -> None:
    """It says what it is in words that are known, and has the methods of its kind."""
    spec = getattr(case.target, "spec", None)
    assert isinstance(spec, StageSpec), f"{case.target.__name__}: has no `spec`, a StageSpec that says what it is"
    assert spec.kind in METHODS, f"{case.name}: kind '{spec.kind}' is none of {', '.join(METHODS)}"
    wanted = (*ALWAYS, *METHODS[spec.kind])
    missing = [name for name in wanted if not callable(getattr(case.target, name, None))]
    assert not missing, (
        f"{case.name}: is of kind {spec.kind} and lacks {', '.join(missing)}; see framework.interfaces.SamplerStage"
    )
    for word in sorted(spec.caps.needs | spec.caps.keeps):
        near = did_you_mean(word, WORDS)
        assert word in WORDS, f"{case.name}: '{word}' is no word of the capabilities.{near} Words: {', '.join(WORDS)}"
    for one in spec.fields:
        assert one.dtype in DTYPES, (
            f"{case.name}: field '{one.name}' has dtype '{one.dtype}'; use one of {', '.join(DTYPES)}"
        )


def check_wants_and_validate(case: StageCase) -> None:
    """`wants` and `validate` tell the case's parameters apart; a case that does not is no case."""
    stage = StageBench(case).stage
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


def check_bad_parameters_are_refused(case: StageCase) -> None:
    """What no parameter can be is a ValueError of `validate`, at admission: nothing is accepted and ignored."""
    names, stage = case.target.spec.extra_args, StageBench(case).stage
    if not names:
        raise Skipped("the stage takes no extra_args")
    for name in names:
        for junk in JUNK:
            try:
                stage.validate(SamplingParams(extra_args={case.name: {name: junk}}))
            except ValueError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"{case.name}: validate raises {type(error).__name__} for extra_args {name}={junk!r};"
                    " ValueError refuses a request, anything else is taken for a bug of the stage"
                ) from error
            raise AssertionError(f"{case.name}: validate accepts extra_args {name}={junk!r}")


def check_request_is_left_alone(case: StageCase) -> None:
    """A stage reads the request that is admitted; its tokens and parameters are the engine's."""
    stage = StageBench(case).stage
    for params in case.wanting:
        request, known = new_request(1, params, outputs=(7, 5)), new_request(1, params, outputs=(7, 5))
        before = repr(params)
        stage.add_request(1, params, request)
        assert same_request(request, known) and repr(params) == before, (
            f"{case.name}: add_request changes the request that it is given"
        )


def check_reused_row_keeps_nothing(case: StageCase) -> None:
    """A row that served one request gives the next one exactly what a fresh row gives."""
    logits = logits_of(1)
    for after in (*case.wanting, *case.plain):
        fresh, used = StageBench(case), StageBench(case)
        for before in case.wanting:
            used.add(1, before)
            used.step([1], logits, [5])
        fresh.add(1, after)
        used.add(1, after)
        for one in fresh.spec.fields:
            if not one.pooled:
                new, old = (bench.ctx.column(one.name).np[1] for bench in (fresh, used))
                assert np.array_equal(new, old), f"{case.name}: field '{one.name}' keeps an old value"
        for _ in range(2):  # the second time with what the first token of the row has left
            new, old = (bench.step([1], logits, [7]) for bench in (fresh, used))
            assert same(new, old), f"{case.name}: a reused row keeps something"


def check_shuffled_batch(case: StageCase) -> None:
    """Permuting the rows of a batch permutes the results, bit for bit, under open and narrow intervals."""
    bench, _, _ = filled(case)
    req_idx, order = list(range(1, NUM_ROWS)), [5, 2, 7, 0, 3, 6, 1, 4]
    logits = logits_of(len(req_idx))
    for narrow in (False, True):
        straight = bench.run(logits, beginning(req_idx), narrow)
        shuffled = bench.run(logits[order], beginning([req_idx[i] for i in order]), narrow)
        assert same(straight[order], shuffled), f"{case.name}: results follow the place in the batch, not the row"


def check_neighbours_change_nothing(case: StageCase) -> None:
    """A row alone gives, bit for bit, what it gives among others, even when a neighbour's logits are no numbers."""
    bench, _, _ = filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits = logits_of(len(req_idx))
    together = bench.run(logits, beginning(req_idx))
    broken = logits.clone()
    broken[2], broken[5] = float("-inf"), float("nan")
    beside = bench.run(broken, beginning(req_idx))
    for place, row in enumerate(req_idx):
        alone = bench.run(logits[place : place + 1], beginning([row]))
        assert same(alone, together[place : place + 1]), f"{case.name}: a neighbour changes row {row}"
        if place not in (2, 5):
            assert same(alone, beside[place : place + 1]), f"{case.name}: a faulty neighbour changes row {row}"


def check_plain_rows_pass_unchanged(case: StageCase) -> None:
    """Rows that do not want the stage leave it bit-equal, after a commit too; so does a table of neutral values."""
    _not_for_select(case)
    bench, _, plain = filled(case)
    for one, req_idx in ((bench, plain), (StageBench(case), list(range(NUM_ROWS)))):
        logits, rows = logits_of(len(req_idx)), beginning(req_idx)
        for narrow in (False, True):
            before = one.run(logits, rows, narrow) if bench.spec.kind == "observe" else logits
            if bench.spec.kind == "threshold":
                interval = narrow_interval(logits) if narrow else open_interval(len(logits), logits.device)
                before = torch.stack(interval, 1)
            assert same(one.run(logits, rows, narrow), before), f"{case.name}: changes a row that did not want it"
            one.commit(rows)  # neighbours want the stage, so that it hears of these rows as well


def check_second_call_is_equal(case: StageCase) -> None:
    """A step changes no state before `commit`, and a stage writes only into what its kind may change."""
    bench, _, _ = filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits, rows = logits_of(len(req_idx)), beginning(req_idx)
    assert same(bench.run(logits, rows), bench.run(logits, rows)), f"{case.name}: a second call gives another result"
    if bench.spec.kind in IN_PLACE:
        return
    own, (lo, hi) = logits.clone(), narrow_interval(logits)
    lo_before, hi_before = lo.clone(), hi.clone()
    if bench.spec.kind == "observe":
        bench.stage.observe(own, own, rows, best(own)[1])
    else:
        call = bench.stage.bounds if bench.spec.kind == "threshold" else bench.stage.select
        call(own, rows, lo, hi)
    kind = bench.spec.kind
    assert same(own, logits), f"{case.name}: writes into the logits, which a stage of kind {kind} must not"
    assert same(lo, lo_before) and same(hi, hi_before), f"{case.name}: writes into the interval it was given"


def check_kept_set(case: StageCase) -> None:
    """Nothing masked or outside of the interval comes back, and no row that has a token loses its last one."""
    bench, _, _ = filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits, rows = logits_of(len(req_idx)), beginning(req_idx)
    if bench.spec.kind in IN_PLACE and bench.deployed.keeps("kept_set"):
        out = bench.run(logits, rows)
        assert bool((out[logits == -torch.inf] == -torch.inf).all()), f"{case.name}: lets a masked token in"
    lo, hi = narrow_interval(logits)
    if bench.spec.kind == "threshold":
        new_lo, new_hi = bench.run(logits, rows, narrow=True).unbind(1)
        assert bool((new_lo >= lo).all() and (new_hi <= hi).all()), f"{case.name}: widens the interval"
        kept = (inside(logits, new_lo, new_hi) > -torch.inf).sum(-1)
        assert bool((kept > 0).all()), f"{case.name}: empties a row"
    if bench.spec.kind == "select":
        ids = bench.run(logits, rows, narrow=True)
        assert bool(((ids >= 0) & (ids < VOCAB_SIZE)).all()), f"{case.name}: picks an id that is no token"
        picked = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        assert bool(((picked >= lo) & (picked <= hi)).all()), f"{case.name}: picks a token outside of the interval"


def check_masked_tokens_never_become_nan(case: StageCase) -> None:
    """-inf stays a number that compares: a masked token, a row of which one token is left, a row of which none is."""
    bench, _, _ = filled(case)
    req_idx = list(range(1, NUM_ROWS))
    logits = logits_of(len(req_idx))
    logits[1, 1:], logits[4, :-1] = float("-inf"), float("-inf")
    if bench.spec.kind in IN_PLACE and not bench.deployed.keeps("argmax"):  # else the row's fault is known before it
        logits[2], logits[3] = float("-inf"), float("-inf")
    out = bench.run(logits, beginning(req_idx))
    if out.is_floating_point():
        where = out.isnan().nonzero()
        assert not len(where), f"{case.name}: makes NaN of -inf, at {where[0].tolist()} of its result"
    if bench.spec.kind == "select":
        assert out[[1, 4]].tolist() == [0, VOCAB_SIZE - 1], f"{case.name}: picks a masked token where one is left"


def check_results_have_their_shape(case: StageCase) -> None:
    """Intervals are float32 [L], ids int64 [L], and logits stay where they are: nothing is broadcast later."""
    bench, _, _ = filled(case)
    logits, rows = logits_of(2), beginning([1, 2])
    if bench.spec.kind in IN_PLACE:
        assert bench.stage.apply(logits, rows) is None, f"{case.name}: apply returns something, which nobody reads"
    elif bench.spec.kind == "threshold":
        for bound in bench.stage.bounds(logits, rows, *narrow_interval(logits)):
            assert (bound.dtype, bound.shape) == (torch.float32, (2,)), (
                f"{case.name}: bounds gives {bound.dtype} {list(bound.shape)}, float32 [2] is wanted for two rows"
            )
    elif bench.spec.kind == "select":
        ids = bench.stage.select(logits, rows, *open_interval(2, logits.device))
        assert (ids.dtype, ids.shape) == (torch.int64, (2,)), (
            f"{case.name}: select gives {ids.dtype} {list(ids.shape)}, int64 [2] is wanted for two rows"
        )
    else:
        payload = bench.stage.observe(logits, logits, rows, best(logits)[1])
        told = bench.stage.collect(payload)
        is_whole = isinstance(told, list) and len(told) == 2
        assert is_whole or not bench.spec.tells_requests, (
            f"{case.name}: tells requests, so collect must give a list with an entry a row: not {told!r} for two rows"
        )


def check_argmax(case: StageCase) -> None:
    """A stage that declares to keep `argmax` leaves the best token the best."""
    bench, _, _ = filled(case)
    if not bench.deployed.keeps("argmax"):
        raise Skipped("the stage does not declare to keep 'argmax'")
    if bench.spec.kind == "observe":
        raise Skipped("an observer changes no logits")
    rows = beginning(list(range(1, NUM_ROWS)))
    for token in (None, 0, *PROMPT, VOCAB_SIZE - 1):  # by a little, so that it is the stage's rule that decides
        logits = logits_of(len(rows.req_idx))
        if token is not None:
            logits[:, token] = logits.amax(-1) + 0.25
        assert _keeps_the_best(bench, logits, rows), f"{case.name}: declares to keep argmax and does not"


def _keeps_the_best(bench: StageBench, logits: Tensor, rows: Rows) -> bool:
    top, ids = best(logits)
    out = bench.run(logits, rows)
    if bench.spec.kind == "select":
        return bool((out == ids).all())
    if bench.spec.kind == "threshold":
        return bool(((out[:, 0] <= top) & (top <= out[:, 1])).all())
    return bool((out.gather(1, ids.unsqueeze(1)).squeeze(1) == out.amax(-1)).all())


def check_unused_stage_costs_nothing(case: StageCase) -> None:
    """A pipeline whose rows do not want the stage does not call it in a step."""
    _not_for_select(case)
    bench = StageBench(case)
    counted = _Counted(bench.stage)
    ctx = context(_AnyToken.spec)
    ours = Deployed(bench.spec.name, bench.spec, counted, bench.ctx, 1)
    pipeline = SamplerPipeline("check", (ours, Deployed("any", _AnyToken.spec, _AnyToken({}, ctx), ctx, 2)))
    for row in (1, 2):
        params = case.plain[row % len(case.plain)]
        pipeline.add_request(row, params, new_request(row, params))
    for wanted in (False, True):  # the second round shows that the count is not blind
        counted.calls.clear()
        rows = beginning([1, 2])
        result = pipeline.sample(logits_of(2), rows)
        pipeline.commit(rows, result.ids.unsqueeze(1), torch.ones(2, dtype=torch.int32))
        assert bool(counted.calls) == wanted, (
            f"{case.name}: called {counted.calls} in a step whose rows want it: {wanted}"
        )
        pipeline.add_request(1, case.wanting[0], new_request(1, case.wanting[0]))


def _not_for_select(case: StageCase) -> None:
    if case.target.spec.kind == "select":
        raise Skipped("every request needs the select stage")


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

    def __init__(self, options: Mapping[str, Any], ctx: Any):
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
    check_it_is_a_stage,
    check_wants_and_validate,
    check_bad_parameters_are_refused,
    check_request_is_left_alone,
    check_reused_row_keeps_nothing,
    check_shuffled_batch,
    check_neighbours_change_nothing,
    check_plain_rows_pass_unchanged,
    check_second_call_is_equal,
    check_kept_set,
    check_masked_tokens_never_become_nan,
    check_results_have_their_shape,
    check_argmax,
    check_unused_stage_costs_nothing,
    *COURSE_CHECKS,
    check_captured_step_serves_other_rows,
)


def check_stage(case: StageCase) -> None:
    """Runs every check on the case; what does not apply to it is left out."""
    assert_all(CHECKS, case)
