"""Checks of a sampler stage over whole requests: what a row gives from its first token to its last, whatever happens.

A course is a request whose tokens are given, so that the stage alone says what comes out of each step. It is run alone,
and then among others, preempted, with drafts and so on: each step must give the same bits. Part of
`framework.testing.stages.CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from framework.request import SamplingParams
from framework.sampling.interval import open_interval
from framework.testing.checking import Skipped
from framework.testing.stage_bench import NUM_ROWS, VOCAB_SIZE, StageBench, StageCase, same

NUM_STEPS = 10
ROW, OTHER_ROW = 3, 6


@dataclass(frozen=True)
class Course:
    """A request with the tokens that it takes and the logits that its steps see. number: says its seed."""

    number: int
    params: SamplingParams

    @cached_property
    def tokens(self) -> list[int]:
        """Few different ones, so that they come again; the prompt's own among them."""
        generator = torch.Generator().manual_seed(self.number)
        few = torch.randint(1, 8, (NUM_STEPS,), generator=generator)
        many = torch.randint(1, VOCAB_SIZE, (NUM_STEPS,), generator=generator)
        return torch.where(torch.arange(NUM_STEPS) % 4 == 3, many, few).tolist()

    @cached_property
    def logits(self) -> Tensor:
        """[steps, V] with masked tokens and some that are equal."""
        generator = torch.Generator().manual_seed(100 + self.number)
        logits = torch.randn(NUM_STEPS, VOCAB_SIZE, generator=generator) * 3
        logits[:, 10] = logits[:, 200] = logits.amax(-1)
        logits[:, 40:60] = float("-inf")
        return logits

    def alone(self, case: StageCase, *, nonsense: int = 0) -> Tensor:
        """What each step gives when nothing happens, [steps, ...]."""
        bench = StageBench(case, nonsense=nonsense)
        bench.add(ROW, self.params, number=self.number)
        return self.steps(bench, ROW, 0)

    def steps(self, bench: StageBench, req_idx: int, first: int, last: int = NUM_STEPS) -> Tensor:
        """Runs steps first to last of the request, alone in the batch."""
        found = [bench.step([req_idx], self.logits[i : i + 1], [self.tokens[i]]) for i in range(first, last)]
        return torch.cat(found)


def _courses(case: StageCase) -> list[Course]:
    """The parameters of the case, wanting and plain by turns."""
    mixed = [p for i, p in enumerate(case.wanting) for p in (p, *case.plain[i : i + 1])]
    rest = [p for p in case.plain if not any(p is q for q in mixed)]
    return [Course(number, params) for number, params in enumerate([*mixed, *rest][: NUM_ROWS - 2])]


def _wanting(case: StageCase) -> list[Course]:
    return [Course(number, params) for number, params in enumerate(case.wanting)]


def _first_difference(one: Tensor, other: Tensor) -> int | None:
    """Step at which two courses part."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not same(a, b)), None)


def _assert_equal(case: StageCase, one: Tensor, other: Tensor, what: str, first: int = 0) -> None:
    step = _first_difference(one, other)
    assert step is None, f"{case.name}: {what}; they part at token {first + step} of the output"


def check_it_acts_on_who_wants_it(case: StageCase) -> None:
    """Somewhere in the requests that want it a stage changes something; a result that is thrown away is found here."""
    kind, params = case.target.spec.kind, case.target.spec.params
    if kind in ("select", "observe"):
        raise Skipped(f"a stage of kind {kind} changes no logits")
    if "structured_outputs" in params:
        raise Skipped("the masks of grammars come with a step, and there are none here")
    for course in _wanting(case):
        found = course.alone(case)
        unchanged = course.logits if kind != "threshold" else torch.stack(open_interval(NUM_STEPS, found.device), 1)
        if not same(found, unchanged):
            return
    raise AssertionError(
        f"{case.name}: changes nothing in any step of the requests that want it. If that is right for these parameters"
        " and options, give its ComponentSpec cases for which it is not"
    )


def check_steps_among_others(case: StageCase) -> None:
    """Requests that share their steps, in another order each time, give what each gives alone."""
    courses = _courses(case)
    alone = [course.alone(case) for course in courses]
    bench = StageBench(case)
    for row, course in enumerate(courses, start=1):
        bench.add(row, course.params, number=course.number)
    for i in range(NUM_STEPS):
        order = torch.randperm(len(courses), generator=torch.Generator().manual_seed(i)).tolist()
        logits = torch.stack([courses[c].logits[i] for c in order])
        found = bench.step([c + 1 for c in order], logits, [courses[c].tokens[i] for c in order])
        for place, c in enumerate(order):
            assert same(alone[c][i], found[place]), (
                f"{case.name}: a request gives something else among others, from token {i} of its output on"
            )


def check_preempted_request_goes_on(case: StageCase) -> None:
    """A request that comes back with its outputs among the known tokens gives what it would have given."""
    for course in _wanting(case):
        alone = course.alone(case)
        for stop in (1, 4):
            bench = StageBench(case, nonsense=stop)
            bench.add(ROW, course.params, number=course.number)
            course.steps(bench, ROW, 0, stop)
            bench.leave(ROW)
            bench.add(ROW, case.wanting[-1], number=50)  # somebody else has the row meanwhile
            course_of_other = Course(50, case.wanting[-1])
            course_of_other.steps(bench, ROW, 0, 2)
            bench.add(OTHER_ROW, course.params, number=course.number, outputs=course.tokens[:stop])
            found = course.steps(bench, OTHER_ROW, stop)
            what = f"a request that was preempted after {stop} tokens goes on otherwise than one that was not"
            _assert_equal(case, alone[stop:], found, what, stop)


def check_chunked_prompt_changes_nothing(case: StageCase) -> None:
    """Between admission and the first token pass steps of others; how many tokens were computed before says nothing."""
    for course in _wanting(case):
        alone = course.alone(case)
        bench = StageBench(case)
        bench.add(ROW, course.params, number=course.number, num_computed_tokens=2)
        neighbour = Course(51, case.wanting[-1])
        bench.add(OTHER_ROW, neighbour.params, number=neighbour.number)
        neighbour.steps(bench, OTHER_ROW, 0, 3)
        found = course.steps(bench, ROW, 0)
        _assert_equal(case, alone, found, "steps of others before its first token change a request")


def check_history_ends_at_the_position(case: StageCase) -> None:
    """What stands in `token_ids` at a row's position and behind is no token: placeholders, drafts, leftovers."""
    for course in _wanting(case):
        what = "reads tokens at or behind the position that a row draws"
        _assert_equal(case, course.alone(case), course.alone(case, nonsense=1), what)


def check_state_lives_in_fields(case: StageCase) -> None:
    """Another object of the stage over the same columns goes on where the first one was."""
    for course in _wanting(case):
        alone = course.alone(case)
        bench = StageBench(case)
        bench.add(ROW, course.params, number=course.number)
        course.steps(bench, ROW, 0, 4)
        bench.rebuild()
        found = course.steps(bench, ROW, 4)
        _assert_equal(case, alone[4:], found, "keeps state of a request outside of its declared fields", 4)


def check_equal_runs_are_equal(case: StageCase) -> None:
    """The same requests give the same bits again, whatever the random generators of the process have drawn."""
    if "deterministic" not in case.target.spec.caps.keeps:
        raise Skipped("the stage does not declare to keep 'deterministic'")
    for course in _wanting(case):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            first = course.alone(case)
            torch.manual_seed(2)
            second = course.alone(case)
        _assert_equal(case, first, second, "two equal runs differ")


def check_each_request_draws_by_its_own_seed(case: StageCase) -> None:
    """A stage that draws takes the row's seed and position: others give other tokens, and not all the same."""
    if case.target.spec.kind != "select" or "argmax" in case.target.spec.caps.keeps:
        raise Skipped("the stage does not draw")
    drawing = [params for params in case.wanting if not params.is_greedy]
    if not drawing:
        raise Skipped("all parameters of the case are greedy")
    flat = torch.zeros(1, VOCAB_SIZE)
    bench = StageBench(case)
    drawn = []
    for number in range(8):
        bench.add(ROW, drawing[0], number=number)
        drawn.append(int(bench.step([ROW], flat, [5])))
    assert len(set(drawn)) > 4, f"{case.name}: eight seeds draw {sorted(set(drawn))} of {VOCAB_SIZE} equal logits"
    drawn = [int(bench.step([ROW], flat, [5])) for _ in range(8)]
    assert len(set(drawn)) > 4, f"{case.name}: eight positions draw {sorted(set(drawn))} of {VOCAB_SIZE} equal logits"


def check_place_0_of_a_pool_stays_neutral(case: StageCase) -> None:
    """Place 0 of a pooled field is that of every row without one: after commits it still holds the neutral value."""
    pooled = [field for field in case.target.spec.fields if field.pooled]
    if not pooled:
        raise Skipped("the stage has no pooled fields")
    bench = StageBench(case)
    courses = [Course(0, case.wanting[0]), *(Course(1 + i, params) for i, params in enumerate(case.plain))]
    for row, course in enumerate(courses, start=1):
        bench.add(row, course.params, number=course.number)
    for i in range(4):
        logits = torch.stack([course.logits[i] for course in courses])
        bench.step(list(range(1, len(courses) + 1)), logits, [course.tokens[i] for course in courses])
    for field in pooled:
        place = bench.ctx.column(field.name).dev[0]
        assert bool((place == field.init).all()), (
            f"{case.name}: a commit writes into place 0 of the pooled field '{field.name}', which is nobody's"
        )


def check_draft_rows_see_the_drafts_before_them(case: StageCase) -> None:
    """Each draft row gives what the request would give after the drafts before that row."""
    _with_drafts(case, _assert_draft_rows)


def check_commit_takes_valid_tokens_only(case: StageCase) -> None:
    """After a step that rejects drafts a request goes on as if they had never been proposed."""
    _with_drafts(case, _assert_rolled_back)


def check_same_on_every_device(case: StageCase) -> None:
    """Where torch sees an accelerator, the stage gives there what it gives on the host, up to float rounding."""
    if not torch.accelerator.is_available():
        raise Skipped("torch sees no accelerator here")
    if case.target.spec.kind == "observe":
        raise Skipped("what an observer tells may differ by a rounding")
    device = torch.accelerator.current_accelerator()
    for course in _wanting(case):
        bench = StageBench(case, device=device)
        bench.add(ROW, course.params, number=course.number)
        there, here = course.steps(bench, ROW, 0).cpu(), course.alone(case)
        if here.is_floating_point():
            masked = torch.equal(here.isinf(), there.isinf())
            close = masked and torch.allclose(here, there, rtol=1e-5, atol=1e-5)
        else:
            close = torch.equal(here, there)
        assert close, f"{case.name}: gives something else on {device} than on the host"


# ------------------------------------------------------------------------------------------------------- draft rows

_DraftRun = tuple[Course, Tensor, Tensor, Tensor]
"""A course, its steps alone, its rows of the step with drafts, and its steps after that."""
KEPT = 3
"""Tokens that the step with drafts gives: two drafts that are right, and the token in the place of the wrong one."""
FIRST = 2
"""Plain steps before the one with drafts."""


def _with_drafts(case: StageCase, judge: Callable[[StageCase, _DraftRun], None]) -> None:
    if "drafts" not in case.target.spec.caps.keeps:
        raise Skipped("the stage does not declare to keep 'drafts', so it never meets draft rows")
    for run in _draft_runs(case):
        judge(case, run)


def _draft_runs(case: StageCase) -> list[_DraftRun]:
    """All courses of the case in one batch, with three drafts or none by turns, in an order of its own."""
    courses = _courses(case)
    bench = StageBench(case, nonsense=3)
    for row, course in enumerate(courses, start=1):
        bench.add(row, course.params, number=course.number)
        course.steps(bench, row, 0, FIRST)
    order = list(range(len(courses)))[::-1]
    drafts = [_drafts_of(courses[c]) if _has_drafts(c) else [] for c in order]
    counts = [len(d) + 1 for d in drafts]
    logits = torch.cat([courses[c].logits[FIRST : FIRST + n] for c, n in zip(order, counts, strict=True)])
    taken = [courses[c].tokens[FIRST : FIRST + (KEPT if _has_drafts(c) else 1)] for c in order]
    rows = bench.draft_step([c + 1 for c in order], drafts, logits, taken).split(counts)
    runs = []
    for c, own in zip(order, rows, strict=True):
        after = courses[c].steps(bench, c + 1, FIRST + (KEPT if _has_drafts(c) else 1))
        runs.append((courses[c], courses[c].alone(case), own, after))
    return runs


def _has_drafts(number: int) -> bool:
    return number % 3 != 2


def _drafts_of(course: Course) -> Sequence[int]:
    """Two that the request will take, and one that it will not."""
    wrong = 1 + course.tokens[FIRST + 2] % (VOCAB_SIZE - 1)
    return [*course.tokens[FIRST : FIRST + 2], wrong]


def _assert_draft_rows(case: StageCase, run: _DraftRun) -> None:
    _, alone, rows, _ = run
    count = min(len(rows), KEPT)  # the row behind the wrong draft stands for a text that never comes to be
    for offset in range(count):
        assert same(rows[offset], alone[FIRST + offset]), (
            f"{case.name}: the row behind {offset} drafts gives something else than the request would after them"
        )


def _assert_rolled_back(case: StageCase, run: _DraftRun) -> None:
    _, alone, rows, after = run
    first = NUM_STEPS - len(after)
    what = f"a request goes on otherwise after {len(rows) - 1} drafts of which not all were taken"
    _assert_equal(case, alone[first:], after, what, first)


COURSE_CHECKS = (
    check_it_acts_on_who_wants_it,
    check_steps_among_others,
    check_preempted_request_goes_on,
    check_chunked_prompt_changes_nothing,
    check_history_ends_at_the_position,
    check_state_lives_in_fields,
    check_equal_runs_are_equal,
    check_each_request_draws_by_its_own_seed,
    check_place_0_of_a_pool_stays_neutral,
    check_draft_rows_see_the_drafts_before_them,
    check_commit_takes_valid_tokens_only,
    check_same_on_every_device,
)
