"""`trace=FILE`: one JSON line for each request and each step of an engine, written as it happens.

Hears the engine's events like any observer and changes nothing. A file that cannot be written any more ends the trace,
with its reason in the log, and not the engine. The builder opens it; `docs/runs.md` says what the lines hold.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from framework.batch import NULL_BLOCK
from framework.engine.trace_format import TRACE_FORMAT, config_line, params_line
from framework.errors import ConfigError
from framework.sampling.trail import watched_rows

if TYPE_CHECKING:
    from framework.batch import BlockOps, NewRequest, SchedulerOutput, StepOutput
    from framework.config import Config
    from framework.engine.stats import StepStats
    from framework.request import NewTokens, Request, RequestOutput

_log = logging.getLogger("framework")


class Trace:
    """Opens `path` and leaves what it holds until `begin`. ConfigError when it cannot be opened.

    with_prompts  whether requests' lines hold the tokens of their prompts, without which nothing can be replayed
    """

    def __init__(self, path: str, *, with_prompts: bool = True) -> None:
        self._path, self._with_prompts = path, with_prompts
        self._last_output: Callable[[], StepOutput | None] = lambda: None
        try:
            self._file: io.FileIO | None = io.FileIO(path, "w", opener=_open_as_it_is)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"trace={path}: {reason}. Name a file in a folder that can be written") from None
        self._ids: dict[int, str] = {}  # request of each row of the request table
        self._ends: dict[str, str] = {}  # finish reason in a step's line, of requests whose end is still to be heard
        self._size = 0  # bytes of whole lines, where the file has a size
        self._start = time.perf_counter()
        self._lock = threading.Lock()  # requests may end on another thread than that of the steps

    def begin(
        self, facts: Mapping[str, Any], config: Config, last_output: Callable[[], StepOutput | None] = lambda: None
    ) -> None:
        """Drops what the file held and writes the first line.

        facts        what the engine was built with
        last_output  asked in `on_step` for the output of that step, which may tell what its stages did
        """
        assert self._file is not None, "a trace begins once, before it is closed"
        if _is_regular(self._file):
            self._file.truncate(0)
        self._start = time.perf_counter()
        self._last_output = last_output
        self._write({"trace": TRACE_FORMAT, "time": time.time(), **facts, "config": config_line(config)})

    def on_request_added(self, request: Request) -> None:
        line = {
            "request": request.request_id,
            "t": self._now(),
            "num_prompt_tokens": len(request.prompt_token_ids),
            "max_total_tokens": request.max_total_tokens,
            "priority": request.priority,
            "seed": request.seed,
            "arrival": request.arrival_index,
            "cache_salt": request.cache_salt,
            "eos_token_ids": sorted(request.eos_token_ids),
            **params_line(request.params),
        }
        if self._with_prompts:
            line["prompt_token_ids"] = request.prompt_token_ids
        self._write(line)

    def on_step(
        self, scheduled: SchedulerOutput, tokens: list[NewTokens], stats: StepStats, counts: Mapping[str, int | float]
    ) -> None:
        preempted, aborted = self._leave(scheduled.preempted), self._leave(scheduled.aborted)
        left = self._leave(scheduled.finished)
        self._ids.update({new.req_idx: new.request_id for new in scheduled.new})
        finished = {new.request.request_id: new.finish_reason for new in tokens if new.finish_reason}
        self._ends.update(finished)
        line = {
            "step": scheduled.step_id,
            "t": self._now(),
            "rows": self._rows(scheduled),
            "admitted": [_admitted(new) for new in scheduled.new],
            "left": left,
            "preempted": preempted,
            "aborted": aborted,
            "tokens": {new.request.request_id: new.token_ids for new in tokens if new.token_ids},
            "finished": finished,
            "only_decodes": scheduled.only_decodes,
            "goes_on": scheduled.goes_on,
            "prompt_tokens": scheduled.num_prompt_tokens,
            "new_blocks": sum(int((delta.ids != NULL_BLOCK).sum()) for delta in scheduled.new_block_ids),
            "blocks": _blocks_of(scheduled),
            "counts": dict(counts),
            "seconds": {part: round(value, 6) for part, value in stats.seconds.items()},
        }
        if scheduled.block_ops:
            moves = _moves_of(scheduled.block_ops)
            line["block_ops"], line["moves"] = {name: len(blocks) for name, blocks in moves.items()}, moves
        line.update(self._of_rows(scheduled))
        self._write(line)

    def on_request_finished(self, request: Request, output: RequestOutput) -> None:
        """A line for each completion whose end no step's line tells, or tells otherwise: a stop string may be found
        when the scheduler, steps ahead, has ended the request already."""
        for one, completion in zip(request.siblings or (request,), output.outputs, strict=True):
            if self._ends.pop(one.request_id, None) != completion.finish_reason:
                self._write({"end": one.request_id, "t": self._now(), "finish_reason": completion.finish_reason})

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _rows(self, scheduled: SchedulerOutput) -> list[list[Any]]:
        """A row: [request id, tokens computed before, tokens of this step, drafts among them, whether it draws]."""
        columns: Iterable[Any] = (
            scheduled.rows, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens, scheduled.num_drafts,
            scheduled.samples,
        )  # fmt: skip
        return [[self._ids[row], *rest] for row, *rest in zip(*(c.tolist() for c in columns), strict=True)]

    def _of_rows(self, scheduled: SchedulerOutput) -> dict[str, Any]:
        """{"grammar": {id: checksum of its mask}, "stages": {id: its trail}} as far as the step has them."""
        told: dict[str, Any] = {}
        output, grammar = self._last_output(), scheduled.grammar_rows
        watched = None if output is None else watched_rows(output.payloads)
        if grammar is None and watched is None:
            return told
        ids = [self._ids[row] for row in scheduled.rows[scheduled.samples].tolist()]
        if grammar is not None:
            pairs = zip(grammar.logits_rows.tolist(), grammar.bits, strict=True)
            told["grammar"] = {ids[row]: zlib.crc32(bits.tobytes()) for row, bits in pairs}
        if watched is not None:
            told["stages"] = dict(zip(ids, watched.trails, strict=True))
        return told

    def _leave(self, rows: Iterable[int]) -> list[str]:
        return [self._ids.pop(row) for row in rows if row in self._ids]

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        text = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with self._lock:
            if self._file is None:
                return
            try:
                _write_whole(self._file, text)
                self._size += len(text)
            except OSError as error:
                file, self._file = self._file, None
                self._give_up(file, error)

    def _give_up(self, file: io.FileIO, error: OSError) -> None:
        if _is_regular(file):
            file.truncate(self._size)  # the part of a line that still fitted
        file.close()
        _log.error(
            "trace=%s: %s. The trace ends here, its lines so far are whole, and the engine goes on",
            self._path, error.strerror,
        )  # fmt: skip


def _admitted(new: NewRequest) -> dict[str, Any]:
    """hit_tokens: known tokens whose KV was there already; resumed: whether it had been preempted after some output."""
    return {
        "id": new.request_id,
        "row": int(new.req_idx),
        "hit_tokens": int(new.num_computed_tokens),
        "known_tokens": len(new.token_ids),
        "resumed": len(new.token_ids) > new.num_prompt_tokens,
    }


def _blocks_of(scheduled: SchedulerOutput) -> list[list[list[int]]]:
    """Of each KV group what is appended to block tables: rows, first columns, counts, and the blocks of all of them,
    with the null block before those that a window reaches."""
    deltas = scheduled.new_block_ids
    return [[column.tolist() for column in (d.rows, d.starts, d.counts, d.ids)] for d in deltas]


def _moves_of(ops: BlockOps) -> dict[str, Any]:
    return {f.name: moves for f in fields(ops) if (moves := getattr(ops, f.name))}


def _write_whole(file: io.FileIO, text: bytes) -> None:
    while text:
        text = text[file.write(text) :]


def _is_regular(file: io.FileIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)
