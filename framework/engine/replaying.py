"""Executes the schedule of a recording step by step, and compares each row with what it did then.

The scheduler has no part in it: each step is the recorded one, with its rows, chunks, blocks and preemptions. A row
that draws another token than the recorded one is sent back like a preempted request, and comes with the known tokens of
the recording and the blocks that it has: later steps stay comparable. `run=replay` calls it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.batch import BlockDelta, BlockOps, GrammarRows, NewRequest, SchedulerOutput
from framework.engine.differences import GRAMMAR_MASK, Difference, first_unlike
from framework.engine.recording import Line, RecordedRequest, Recording
from framework.errors import ConfigError, StageError
from framework.sampling.trail import WatchedRows, watched_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.batch import StepOutput
    from framework.engine.engine import Engine
    from framework.structured.constraint import Constraint

_COMPILE_S = 60.0
_MOVES = ("swap_out", "copy", "swap_in")


@dataclass(frozen=True)
class Suspect:
    """The first row whose token differs while nothing recorded tells the stage: what is needed to find it.

    recorded, request  as it was recorded and as it is now, before the token
    logits             [V] of the model; mask: words of its grammar's mask, or None
    """

    recorded: RecordedRequest
    request: RecordedRequest
    logits: Any
    mask: NDArray[np.int32] | None


@dataclass
class Outcome:
    """differences: the first of each request. num_unlike: rows that differ, num_unlike_tokens: those whose token does.
    broken: what a stage raised, which ended it."""

    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_unlike: int = 0
    num_unlike_tokens: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)
    suspect: Suspect | None = None
    broken: str | None = None

    @property
    def first(self) -> Difference | None:
        return next(iter(self.differences.values()), None)


class _Stay:
    """What a request holds from its admission to its end: its row, and its blocks a KV group in token order."""

    def __init__(self, request: RecordedRequest, row: int, num_groups: int) -> None:
        self.request, self.row = request, row
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.is_astray = False  # the device has a token of it that is not the recorded one


class Replay:
    """Of one recording on one engine, which has been built with `keep_logits` and serves nobody else.

    changed         a request with the parameters and the seed that it has now
    compare_stages  whether trails are compared beside tokens, where the recording has them
    """

    def __init__(
        self,
        engine: Engine,
        recording: Recording,
        changed: Callable[[RecordedRequest], RecordedRequest],
        *,
        compare_stages: bool,
    ) -> None:
        self._engine, self._changed, self._path = engine, changed, recording.path
        self._compare_stages = compare_stages and recording.has_stages
        self._events = recording.events
        self._recorded: dict[str, RecordedRequest] = {}
        self._requests: dict[str, RecordedRequest] = {}  # as they are now
        self._constraints: dict[str, Constraint] = {}
        self._stays: dict[str, _Stay] = {}
        self.outcome = Outcome()

    def run(self, advance: Callable[[int], Any] = lambda _: None) -> Outcome:
        """Executes all steps. `advance(1)` is called behind each: it may end the replay by raising."""
        for event in self._events:
            if isinstance(event, RecordedRequest):
                self._add(event)
                continue
            try:
                self._step(event)
            except StageError as error:
                self._broke(event, error)
                break
            advance(1)
        return self.outcome

    def _add(self, recorded: RecordedRequest) -> None:
        request = self._changed(recorded)
        self._recorded[request.request_id], self._requests[request.request_id] = recorded, request
        self.outcome.num_requests += 1
        grammars = self._engine.admission.grammars
        if request.params.structured_outputs is not None:
            grammars.check(request.params)
        constraint = grammars.constraint(request.params, request.eos_token_ids, request.prompt_token_ids)
        if constraint is not None:
            constraint.wait(_COMPILE_S)
            if not constraint.is_ready():
                raise ConfigError(
                    f"trace={self._path}: the grammar of request {request.request_id!r} is not there: "
                    f"{constraint.error or f'not compiled in {_COMPILE_S:.0f} s'}"
                )
            self._constraints[request.request_id] = constraint

    def _step(self, line: Line) -> None:
        step = _Step(line)
        scheduled, masks = self._scheduled(step)
        output = self._engine.core.executor.execute(scheduled).result()
        self.outcome.num_steps += 1
        self._compare(step, output, masks)

    # ------------------------------------------------------------------------------------------------ decisions

    def _scheduled(self, step: _Step) -> tuple[SchedulerOutput, dict[str, NDArray[np.int32]]]:
        """The step as the scheduler decided it, and the masks of its grammars by request."""
        values = step.values
        left, preempted, aborted = (self._leave(values[key]) for key in ("left", "preempted", "aborted"))
        new = [self._admit(admitted, len(values["blocks"])) for admitted in values["admitted"]]
        deltas = self._append_blocks(values["blocks"])
        back = self._bring_back(step, deltas)
        masks = self._masks(step)
        scheduled = SchedulerOutput(
            step_id=values["step"],
            rows=np.array([self._stays[one].row for one in step.ids], np.int32),
            num_computed_tokens=step.column(1),
            num_scheduled_tokens=step.column(2),
            num_drafts=step.column(3),
            samples=np.array([row[4] for row in step.rows], np.bool_),
            new=[*new, *back],
            new_block_ids=tuple(deltas),
            finished=left,
            preempted=[*preempted, *(one.req_idx for one in back)],
            aborted=aborted,
            num_prompt_tokens=values["prompt_tokens"],
            only_decodes=values["only_decodes"],
            goes_on=values["goes_on"] and not back,
            block_ops=_moves(values.get("moves", {})),
            grammar_rows=_grammar_rows(step, masks),
        )
        return scheduled, masks

    def _leave(self, ids: Sequence[str]) -> list[int]:
        return [self._stays.pop(one).row for one in ids if one in self._stays]

    def _admit(self, admitted: Mapping[str, Any], num_groups: int) -> NewRequest:
        request = self._requests[admitted["id"]]
        self._stays[request.request_id] = _Stay(request, admitted["row"], num_groups)
        return _new(request, admitted["row"], admitted["known_tokens"], admitted["hit_tokens"])

    def _append_blocks(self, groups: Sequence[Sequence[list[int]]]) -> list[BlockDelta]:
        by_row = {stay.row: stay for stay in self._stays.values()}
        deltas = []
        for number, (rows, starts, counts, ids) in enumerate(groups):
            end = 0
            for row, start, count in zip(rows, starts, counts, strict=True):
                begin, end = end, end + count
                by_row[row].blocks[number][start:] = ids[begin:end]
            deltas.append(BlockDelta(*(np.array(column, np.int32) for column in (rows, starts, counts, ids))))
        return deltas

    def _bring_back(self, step: _Step, deltas: list[BlockDelta]) -> list[NewRequest]:
        """Admissions of the step's rows that went astray, with the recorded tokens and all of their blocks."""
        back = []
        for request_id, computed in zip(step.ids, step.column(1).tolist(), strict=True):
            stay = self._stays[request_id]
            if stay.is_astray:
                stay.is_astray = False
                back.append(_new(stay.request, stay.row, len(stay.request.token_ids), computed))
                for number, delta in enumerate(deltas):
                    deltas[number] = _with_all(delta, stay.row, stay.blocks[number])
        return back

    def _masks(self, step: _Step) -> dict[str, NDArray[np.int32]]:
        masks = {}
        for request_id in step.sampling:
            constraint = self._constraints.get(request_id)
            if constraint is not None:
                bits = np.empty((1, constraint.num_words), np.int32)
                constraint.fill(bits)
                masks[request_id] = bits[0]
        return masks

    # ----------------------------------------------------------------------------------------------- comparison

    def _compare(self, step: _Step, output: StepOutput, masks: Mapping[str, NDArray[np.int32]]) -> None:
        watched = watched_rows(output.payloads)
        number = 0
        for at, row in enumerate(step.rows):
            if row[4]:
                self._compare_row(step, row, _Drawn(output, watched, at, number), masks.get(row[0]))
                number += 1

    def _compare_row(self, step: _Step, row: Sequence[Any], drawn: _Drawn, mask: NDArray[np.int32] | None) -> None:
        request_id = row[0]
        if not step.tells(request_id):  # it was aborted or preempted meanwhile, and nobody saw the token
            return
        request, recorded, now = self._requests[request_id], step.token(request_id), drawn.token
        self.outcome.num_tokens += 1
        stage, how = self._stage(step, request_id, drawn, mask)
        if stage is not None or recorded != now:
            self._differs(step, request, stage, how, recorded, now, drawn, mask)
        if recorded is not None:
            self._stays[request_id].is_astray = recorded != now
            self._take(request, recorded)

    def _stage(
        self, step: _Step, request_id: str, drawn: _Drawn, mask: NDArray[np.int32] | None
    ) -> tuple[str | None, str]:
        """(the first stage that differs by what was recorded, how it does); (None, "") where nothing tells."""
        recorded = step.values.get("stages", {}).get(request_id)
        if self._compare_stages and recorded is not None and drawn.trail is not None:
            unlike = first_unlike(recorded, drawn.trail)
            if unlike is not None:
                return unlike.stage, unlike.how
        then = step.values.get("grammar", {}).get(request_id)
        if then != (None if mask is None else zlib.crc32(mask.tobytes())):
            return GRAMMAR_MASK, "the grammar allows other tokens"
        return None, ""

    def _differs(
        self,
        step: _Step,
        request: RecordedRequest,
        stage: str | None,
        how: str,
        recorded: int | None,
        now: int | None,
        drawn: _Drawn,
        mask: NDArray[np.int32] | None,
    ) -> None:
        self.outcome.num_unlike += 1
        self.outcome.num_unlike_tokens += recorded != now
        if request.request_id in self.outcome.differences:
            return
        if not self.outcome.differences and stage is None and drawn.logits is not None:
            both = [replace(one) for one in (self._recorded[request.request_id], request)]
            for one in both:
                one.token_ids = list(request.token_ids)
            self.outcome.suspect = Suspect(both[0], both[1], drawn.logits, mask)
        place, how = len(request.token_ids), how or drawn.error or ""
        self.outcome.differences[request.request_id] = Difference(
            step.values["step"], step.line, request.request_id, place, stage, how, recorded, now
        )

    def _take(self, request: RecordedRequest, token: int) -> None:
        request.token_ids.append(token)
        constraint = self._constraints.get(request.request_id)
        if constraint is not None:
            constraint.take([token], len(request.token_ids) - len(request.prompt_token_ids))

    def _broke(self, line: Line, error: StageError) -> None:
        """A stage that raised has taken the step with it: nothing can follow."""
        step = _Step(line)
        request_id = error.request_id or (step.sampling or step.ids)[0]
        request = self._requests[request_id]
        self.outcome.broken, self.outcome.num_unlike = str(error), self.outcome.num_unlike + 1
        self.outcome.differences.setdefault(
            request_id,
            Difference(
                step.values["step"], line.number, request_id, len(request.token_ids), error.stage, str(error),
                step.token(request_id), None,
            ),
        )  # fmt: skip


class _Step:
    """A step's line."""

    def __init__(self, line: Line) -> None:
        self.line, self.values = line.number, line.values
        self.rows: list[list[Any]] = line.values["rows"]
        self.ids: list[str] = [row[0] for row in self.rows]
        self.sampling = [row[0] for row in self.rows if row[4]]

    def column(self, place: int) -> NDArray[np.int32]:
        return np.array([row[place] for row in self.rows], np.int32)

    def tells(self, request_id: str) -> bool:
        """Whether the row's token counted for something."""
        return request_id in self.values["tokens"] or self.values["finished"].get(request_id) == "error"

    def token(self, request_id: str) -> int | None:
        """The recorded one, None for a row that ended with an error."""
        tokens: list[int] = self.values["tokens"].get(request_id, [])
        return tokens[0] if tokens else None


class _Drawn:
    """What a step has drawn for one row. at: its batch row; number: of its logits row."""

    def __init__(self, output: StepOutput, watched: WatchedRows | None, at: int, number: int) -> None:
        self.error = output.errors.get(at)
        self.token = int(output.sampled[at, 0]) if output.num_valid[at] and self.error is None else None
        self.trail = None if watched is None else watched.trails[number]
        self.logits = None if watched is None or watched.logits is None else watched.logits[number]


def _new(request: RecordedRequest, row: int, num_known: int, num_computed: int) -> NewRequest:
    return NewRequest(
        req_idx=row,
        request_id=request.request_id,
        token_ids=np.array(request.token_ids[:num_known], np.int32),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_computed_tokens=num_computed,
        params=request.params,
        seed=request.seed,
    )


def _with_all(delta: BlockDelta, row: int, blocks: Sequence[int]) -> BlockDelta:
    """The delta with all blocks of a row, in the place of those that it appends."""
    keep = delta.rows != row
    ids = delta.ids[np.repeat(keep, delta.counts)]
    more = ([row], [0], [len(blocks)], blocks)
    columns = (delta.rows[keep], delta.starts[keep], delta.counts[keep], ids)
    return BlockDelta(*(np.append(old, new).astype(np.int32) for old, new in zip(columns, more, strict=True)))


def _moves(moves: Mapping[str, Any]) -> BlockOps:
    pairs = {name: [(source, target) for source, target in moves.get(name, ())] for name in _MOVES}
    return BlockOps(**pairs, zero=list(moves.get("zero", ())))


def _grammar_rows(step: _Step, masks: Mapping[str, NDArray[np.int32]]) -> GrammarRows | None:
    if not masks:
        return None
    rows = [number for number, request_id in enumerate(step.sampling) if request_id in masks]
    return GrammarRows(np.array(rows, np.int32), np.stack([masks[step.sampling[row]] for row in rows]))
