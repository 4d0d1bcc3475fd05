"""The default scheduler: how many tokens of which request each step computes, and who gives way when blocks run out.

There is no prefill phase: chunk, decode and resumed span are one case, `known + in flight - computed` tokens cut to the
budget. Holds no tensor. The engine calls `schedule` and `update`; order and victims are the policy's.
"""

from __future__ import annotations

import time
from bisect import insort_left, insort_right
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from framework.batch import NULL_BLOCK
from framework.errors import ConfigError, NotBuiltError, RequestError
from framework.interfaces import Capabilities
from framework.nulls import NoConnector
from framework.request import NewTokens, OneEach, Request, RequestStatus
from framework.scheduler.block_pool import BlockPool
from framework.scheduler.constrained import grammar_rows
from framework.scheduler.course import Course, gives_one_each
from framework.scheduler.endings import append_tokens, stays
from framework.scheduler.kv_groups import KVGroups, in_token_order, num_held
from framework.scheduler.ledger import Kept, Ledger, StepRecord
from framework.scheduler.parked import Loading, Parked
from framework.scheduler.prefix_cache import PrefixCache
from framework.scheduler.siblings import Fork, fork_of, is_worth_waiting, num_shared, wants_fork
from framework.scheduler.step_plan import Leaving, StepPlan
from framework.scheduler.swap_space import SwapSpace

if TYPE_CHECKING:
    from framework.batch import SchedulerOutput, StepOutput, Transfers
    from framework.interfaces import SchedulerContext
    from framework.structured.constraint import Constraint

_COUNTS = (
    "num_preemptions", "num_swap_outs", "num_swap_fallbacks", "num_failed_loads", "prefix_hit_tokens",
    "connector_hit_tokens", "prefix_query_tokens", "prefix_recomputed_tokens",
)  # fmt: skip
_RUNNING = RequestStatus.RUNNING
_GRAMMAR_WAIT_S = 0.01
"""Longest wait for a grammar to be compiled when there is nothing else to do: then the engine looks around again."""
_by_arrival = attrgetter("arrival_index")


def check_context(ctx: SchedulerContext) -> None:
    """Refuses what this scheduler cannot serve: NotBuiltError for a part to come, ConfigError for a wrong limit."""
    sizes = sorted({group.block_size for group in ctx.groups})
    if len(sizes) != 1:
        raise NotBuiltError(f"KV groups with different block sizes {sizes} are not built yet. Set kv_cache.block_size.")
    windows = [group.window for group in ctx.groups if group.window is not None]
    # the engine refuses the two before weights load
    assert not windows or type(ctx.connector) is NoConnector, f"{ctx.connector} beside windows {windows}"
    if ctx.num_lookahead:
        raise NotBuiltError(
            f"scheduler 'default' has no slots for {ctx.num_lookahead} draft tokens yet. Use spec_decode=none."
        )
    limits = (
        ("kv_cache.num_blocks", ctx.num_blocks, 1 + len(ctx.groups)),
        ("scheduler.max_num_seqs", ctx.max_num_seqs, 1),
        ("scheduler.max_num_batched_tokens", ctx.max_num_batched_tokens, 1),
    )
    for key, value, least in limits:
        if value < least:
            raise ConfigError(f"{key} must be at least {least}, got {value}. Raise {key}.")


class Scheduler:
    """Continuous batching over one block pool.

    Running requests come first, in the order of their admission, so that a prompt never starves a decode; what is left
    of the budget admits waiting requests in the policy's order, without overtaking. Admission takes the blocks of every
    known token at once: a prompt that has started is never stopped half-way for want of blocks, and its blocks tend to
    be consecutive. It leaves one free block to each running request that will still grow, because a request that is
    admitted into the last blocks would be preempted within a few steps.

    KV groups with a window are the exception: they take blocks for a step's tokens alone, and give a block up when the
    tokens behind it are committed and their window does not reach it any more. Steps in flight begin there or later, so
    that none of them reads it.

    When a running request finds no block, the policy names victims among the running ones; a waiting request may
    displace running ones as well, if the policy, asked with the newcomer among them, names somebody else. A victim
    loses blocks and row, waits at its place by arrival, and returns as a fresh admission. With swap space, its computed
    blocks wait in host memory and are brought back with it; when that is full, they are computed again.

    A KV connector may bring tokens beyond the local hit: within the step that admits the request, or beside steps while
    the request waits with its blocks and without a row. What it fails to bring is computed. Blocks that it keeps, and
    those that it fills for a request that has gone, are parked until it reports them.

    Without chunked prefill a span is scheduled whole or not at all. The one exception is a resumed request whose prompt
    and outputs have outgrown max_num_batched_tokens: it can only come back in pieces.

    A request with a constraint is admitted when its grammar is compiled; until then others pass it. It never has two
    tokens in flight, since the mask of the one follows from the other.
    """

    caps: ClassVar[Capabilities] = Capabilities(keeps=frozenset({"grammars"}))

    def __init__(self, options: Mapping[str, Any], ctx: SchedulerContext) -> None:
        if options:
            raise ConfigError(f"scheduler 'default' has no option '{next(iter(options))}'. Remove scheduler.options.")
        check_context(ctx)
        self._ctx = ctx
        self._policy = ctx.policy
        self._connector = ctx.connector
        self._is_watched = type(ctx.connector) is not NoConnector  # it holds requests, and may look at any call
        self._groups = KVGroups(ctx.groups)
        self._num_groups, self._block_size = self._groups.num, self._groups.block_size
        self.pool = BlockPool(ctx.num_blocks)
        self._cache = PrefixCache(self.pool, self._groups, ctx.prefix_caching)
        # a block that may be found, or that pushes another out of a window, is committed with the step that fills it
        self._commits_at_once = ctx.prefix_caching or bool(self._groups.sliding)
        self._commit_blocks = self._commit_and_give_up if self._groups.sliding else self._cache.commit
        self._shortest = self._groups.shortest
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # in order of arrival
        self._compiling: dict[Request, Constraint] = {}  # of those that wait: not compiled when last looked at
        self._num_constrained = 0
        self._running: list[Request] = []  # in order of admission
        self._free_rows = list(range(ctx.max_num_seqs, 0, -1))
        self._leaving = Leaving()
        self._ledger = Ledger()
        self._decodes: StepRecord | None = None  # the last step, if it was one of decodes and all of them still run
        self._course: Course | None = None  # what has followed on it
        self._parked = Parked()
        self._swap = SwapSpace(ctx.num_swap_blocks)
        self._loads: dict[Request, range] = {}  # columns that the connector fills, or has filled, in this stay
        self._load_no_more: set[Request] = set()  # a load of theirs has failed
        self._next_step_id = self._next_lease = 0
        self._counts = dict.fromkeys(_COUNTS, 0)

    # ------------------------------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        """RequestError when its id is taken, or when it could never run under the limits; changes nothing."""
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id}: the id is in use. Choose another request_id.")
        assert len(request.prompt_token_ids) < request.max_total_tokens, request
        self._check_fits(request)

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises what `check_request` raises."""
        self.check_request(request)
        self._settle()
        self._requests[request.request_id] = request
        insort_right(self._waiting, request, key=_by_arrival)
        if request.constraint is not None:
            self._compiling[request] = request.constraint
            self._num_constrained += 1

    def _check_fits(self, request: Request) -> None:
        total, there = request.max_total_tokens, self._ctx.num_blocks - 1
        needed = self._groups.most_blocks(total, min(total, self._ctx.max_num_batched_tokens))
        if needed > there:
            is_open = request.params.max_tokens is None
            limit, way_out = ("max_tokens=None", "set") if is_open else ("max_tokens", "lower")
            raise RequestError(
                f"prompt and {limit} are {request.max_total_tokens} tokens and need {needed} blocks, but the pool has "
                f"{there}. Raise kv_cache.num_blocks or {way_out} max_tokens."
            )
        budget = self._ctx.max_num_batched_tokens
        if not self._ctx.chunked_prefill and request.num_prompt_tokens > budget:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens but "
                f"scheduler.max_num_batched_tokens is {budget} and scheduler.chunked_prefill is false. "
                "Raise scheduler.max_num_batched_tokens or set scheduler.chunked_prefill=true."
            )

    def abort(self, request_id: str) -> Request | None:
        """Ends a waiting or running request with finish_reason `abort`; None when the id is not known (any more).

        Tokens that steps in flight still return for it are dropped.
        """
        return self._leave(request_id, "abort", None)

    def stop(self, request_id: str, stop_string: str) -> Request | None:
        """Like `abort`, with finish_reason `stop`: the output side has found a stop string in the text."""
        return self._leave(request_id, "stop", stop_string)

    def _leave(self, request_id: str, reason: str, stop_string: str | None) -> Request | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.stop_reason = stop_string
        if request.status is _RUNNING:
            (self._leaving.aborted if reason == "abort" else self._leaving.finished).append(request.req_idx)
            self._stop_running(request)
        elif request.status is not RequestStatus.LOADING:
            self._waiting.remove(request)
        self._end(request, reason)
        return request

    def has_work(self) -> bool:
        """Whether a request waits or runs, or a connector keeps blocks that it gives back with a later step. The caller
        brings back its steps in flight even when there is nothing of that."""
        return bool(self._requests or self._parked)

    def stats(self) -> Mapping[str, int | float]:
        """num_blocks counts the null block, like kv_cache.num_blocks; all are free when num_free_blocks is one less.
        num_cached_blocks are those of the free ones whose content may still be found.

        The prefix counters and connector_hit_tokens hold tokens of first admissions only. num_swap_fallbacks counts
        preemptions that found no room in host memory, num_waiting those that wait for a load as well.
        Requests are up to date afterwards: between steps that go on, their counters may be behind.
        """
        self._settle()
        return {
            "num_waiting": len(self._waiting) + len(self._parked.loading),
            "num_running": len(self._running),
            "num_free_blocks": self.pool.num_free,
            "num_cached_blocks": self.pool.num_reusable,
            "num_blocks": self._ctx.num_blocks,
            "num_free_swap_blocks": self._swap.num_free,
            "num_swap_blocks": self._swap.num_blocks,
            **self._counts,
        }

    # ------------------------------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput:
        """The next step; without any row when all requests wait for steps in flight."""
        assert len(self._ledger) < self._ctx.max_in_flight, f"{len(self._ledger)} steps in flight already"
        step = self._go_on() or self._decide()
        self._next_step_id += 1
        if self._is_watched:
            self._settle()
            step.scheduled.connector_meta = self._connector.build_meta(step.scheduled)
        self._ledger.push(step)
        return step.scheduled

    def _go_on(self) -> StepRecord | None:
        """The next step when it is the last one over again, a token further; None when it has to be decided."""
        if self._decodes is None or (self._waiting and self._free_rows):
            return None
        if self._course is None:
            self._course = Course(self._decodes, self._block_size, self._num_groups)
        course = self._course
        if course.room < 1 or self.pool.num_free < course.num_entering:
            return None
        return course.emit(self._next_step_id, self.pool)

    def _settle(self) -> None:
        """Brings the requests up to date, for whoever may look at them now."""
        course = self._course
        if course is None or not course.settle() or self._commits_at_once:
            return
        for request, num_blocks in zip(course.requests, course.num_filled(), strict=True):
            if num_blocks > request.num_published_blocks:
                self._cache.commit(request, num_blocks)

    def _end_course(self) -> None:
        self._settle()
        self._decodes = self._course = None

    def _decide(self) -> StepRecord:
        self._settle()
        before = self._decodes
        plan = StepPlan(self._ctx.max_num_batched_tokens)
        try:
            self._continue_running(plan)
            self._admit_waiting(plan)
        except Exception:  # the policy's
            self._abandon(plan)
            raise
        step = self._emit(plan)
        scheduled = step.scheduled
        is_whole = scheduled.only_decodes and len(step.requests) == len(self._running)
        if self._num_constrained:
            scheduled.grammar_rows = grammar_rows(step)
            is_whole = is_whole and scheduled.grammar_rows is None
            if self._compiling and not (step.requests or self._ledger):
                next(iter(self._compiling.values())).wait(_GRAMMAR_WAIT_S)
        if is_whole and before is not None and before is self._decodes and before.requests == step.requests:
            scheduled.goes_on = True  # nobody came or left, so no block moves: decided anew, it is the same step
        self._decodes, self._course = step if is_whole else None, None
        return step

    def _abandon(self, plan: StepPlan) -> None:
        """Ends a plan that cannot be finished like a step that is made and lost: no move of it comes with a later one,
        when its blocks are somebody else's. Who arrived with it waits again; who ran is left to the caller to abort."""
        leaving, self._leaving = self._leaving, Leaving()
        step = self._emit(plan)
        self._lose(step.scheduled, self._connector.build_meta(step.scheduled))
        self.pool.free(step.sources)
        for request in plan.new:
            self._send_back(request)
        self._leaving = leaving  # nobody has been told of the rows of those that arrived
        self._end_course()

    def _lose(self, scheduled: SchedulerOutput, connector_meta: Any) -> None:
        self._swap.lose(scheduled.block_ops.swap_out)
        self._connector.step_lost(connector_meta)

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        self._end_course()

    def _continue_running(self, plan: StepPlan) -> None:
        block_size = self._block_size
        for request in self._running[:]:  # victims leave the list meanwhile
            if not plan.budget:
                return
            if request.status is not _RUNNING:
                continue
            target = len(request.token_ids) + request.num_in_flight
            if target >= request.max_total_tokens:
                continue  # a step in flight draws its last token
            if request.num_in_flight and request.constraint is not None:
                continue  # what may come next follows from the token in flight
            start = request.num_computed_tokens
            num_tokens = target - start
            # one token fits the budget, and unless it begins a block it lies in that of the token before it
            if num_tokens > 1 or not start % block_size:
                num_tokens = min(num_tokens, plan.budget)
                if not self._holds(request, start + num_tokens, plan):
                    continue
            plan.add(request, num_tokens)

    def _holds(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Whether the request has blocks for `num_tokens` tokens, now or after it got some."""
        held = len(request.block_ids[self._shortest])
        return num_tokens <= held * self._block_size or self._grow(request, num_tokens, plan)

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Gives a running request blocks for `num_tokens` tokens; False when it yields or has to wait for a step."""
        held, needed = [len(blocks) for blocks in request.block_ids], self._num_blocks(num_tokens)
        count = sum([needed - n for n in held if n < needed])
        while self.pool.num_free < count:
            if not self._preempt_for(request, count, plan):
                return False
        for blocks, n in zip(request.block_ids, held, strict=True):
            if n < needed:
                blocks.extend(self.pool.allocate(needed - n))
        plan.columns[request] = held
        return True

    def _preempt_for(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Preempts one request towards `count` free blocks for `request`; False when that one must yield or wait."""
        plan.is_short = True
        ending = [r for r in self._running if r.num_tokens + r.num_in_flight >= r.max_total_tokens]
        coming_back = self._ledger.num_kept_blocks + sum(num_held(r.block_ids) for r in ending)
        if self._groups.sliding and request.status is _RUNNING:  # one that waits gets what running ones leave
            coming_back += sum(self._num_behind(r) for r in self._running if r not in ending)
        if self.pool.num_free + coming_back >= count:
            return False  # enough blocks come back with the steps in flight
        if self._unload(request):
            return True
        if self.pool.num_free + coming_back + self._parked.num_blocks >= count:
            return False  # or with what the connector reports
        candidates = [r for r in self._running if r not in plan.new and r not in ending]
        victim = self._policy.victim(candidates if request.status is _RUNNING else [*candidates, request])
        assert victim is request or victim in candidates, f"{type(self._policy).__name__} chose {victim.request_id}"
        if victim.status is _RUNNING:
            self._preempt(victim, plan)
        return victim is not request

    def _num_behind(self, request: Request) -> int:
        """Blocks that nobody but the request holds, and that it gives up once its steps in flight are back."""
        behind = self._groups.behind(request.block_ids, request.num_computed_tokens)
        return sum(self.pool.ref_count(block) == 1 for block in behind)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.take_back(request)
        self._swap_out(request)
        self._counts["num_preemptions"] += 1
        self._send_back(request)

    def restart(self) -> None:
        """Every running request waits and is computed anew: what steps in flight would have written is lost."""
        for request in self._running[::-1]:
            self._send_back(request)

    def _send_back(self, request: Request) -> None:
        """From the running ones to the waiting ones, without row and blocks."""
        self._leaving.preempted.append(request.req_idx)
        self._stop_running(request)
        self._give_up(request, self._connector.request_preempted(request, request.block_ids))
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1  # also the generation: tokens of its steps in flight are dropped
        request.num_computed_tokens = request.num_in_flight = request.num_published_blocks = 0
        insort_left(self._waiting, request, key=_by_arrival)

    def _swap_out(self, request: Request) -> None:
        """Keeps the request's committed blocks in host memory, if there is room; those of a request for prompt
        logprobs, which needs every position computed, are of no use, nor are those without the window before them."""
        count = request.num_published_blocks
        if not self._swap.num_blocks or not count or request.params.prompt_logprobs is not None:
            return
        if self._groups.has_passed(request.block_ids, count * self._block_size):
            return
        has_room = self._swap.swap_out(request, [blocks[:count] for blocks in request.block_ids])
        self._counts["num_swap_outs" if has_room else "num_swap_fallbacks"] += 1

    def _unload(self, request: Request) -> bool:
        """Takes the blocks of the youngest other request that waits with loaded ones; False when there is none."""
        loaded = [r for r in self._waiting if r.block_ids and r is not request]
        if loaded:
            self._drop_loaded(loaded[-1])
        return bool(loaded)

    # ----------------------------------------------------------------------------------------- admission

    def _admit_waiting(self, plan: StepPlan) -> None:
        if not self._waiting or not self._may_admit(plan):
            return
        for request in self._policy.order(self._waiting[:]):
            if not self._try_admit(request, plan) or not self._may_admit(plan):
                return

    def _may_admit(self, plan: StepPlan) -> bool:
        return bool(plan.budget and self._free_rows) and not plan.is_short

    def _try_admit(self, request: Request, plan: StepPlan) -> bool:
        """Admits the request if it can run now, or begins its load; False ends admission for this step, so that nobody
        overtakes it."""
        if request.constraint is not None and not request.constraint.is_ready():
            return True  # only this request waits
        if request.block_ids:
            return self._admit_loaded(request, plan)
        hits = self._cache.lookup(request)
        num_local = len(hits[0]) * self._block_size
        swapped = self._swap.num_columns(request) * self._block_size
        fork = None
        if request.siblings and wants_fork(request, max(num_local, swapped)):
            fork = fork_of(request, self._groups, self._ledger, plan.new)
            there = max(num_local, swapped)
            if fork is None and is_worth_waiting(request, there, self._num_published(request), self._groups):
                return True  # only this request waits
        has_own = swapped or fork is not None
        num_external, is_async = (0, False) if has_own else self._external_tokens(request, num_local)
        if num_external is None:
            return True  # the connector does not know yet: only this request waits
        num_computed = max(num_local + num_external, swapped)
        if fork is not None:
            hits = [blocks[: fork.num_blocks] for blocks in fork.donor.block_ids]
            num_computed = fork.num_tokens
        num_tokens = self._first_span(request.num_tokens - num_computed, plan.budget)
        self._groups.trim(hits, num_computed)
        new = self._groups.new_columns(len(hits[0]), request.num_tokens, num_computed, num_computed + num_tokens)
        rest = range(num_computed + num_tokens, request.num_tokens)
        if not num_tokens or not self._leaves_room(request, self._num_claimed(hits, new, rest)):
            return False
        # Asked even when its answer does not count: a policy may keep a tally of admissions.
        if not self._policy.admit(request, plan.budget) and self._running:
            return False
        # counted anew after each victim: a hit that only the victim held is taken from the free blocks now
        while (count := self._num_claimed(hits, new, rest)) > self.pool.num_free:
            if not self._preempt_for(request, count, plan) or (fork and not fork.donor.block_ids):
                return False
        if fork is not None and request.num_cached_tokens < 0:
            request.num_cached_tokens = fork.donor.num_cached_tokens  # the counters are those of the first sibling
        self._take_blocks(request, hits, new, num_computed, num_external)
        if fork is not None:
            self._copy_rest(fork, request, plan)
        if is_async:
            request.status = RequestStatus.LOADING
            self._parked.loading[request.lease] = Loading(request)
        else:
            self._run(request, plan, num_tokens)
        return True

    def _num_published(self, request: Request) -> int:
        """Tokens of the request's prompt that a sibling publishes when it has computed them."""
        return num_shared(request) // self._block_size * self._block_size if self._ctx.prefix_caching else 0

    def _copy_rest(self, fork: Fork, request: Request, plan: StepPlan) -> None:
        """Copy on write of the last, partial block: the donor writes on in its own, the sibling in the copy."""
        if fork.num_tokens % self._block_size:
            for theirs, own in zip(fork.donor.block_ids, request.block_ids, strict=True):
                plan.copies.append((theirs[fork.num_blocks], own[fork.num_blocks]))
                self.pool.hold(theirs[fork.num_blocks])

    def _admit_loaded(self, request: Request, plan: StepPlan) -> bool:
        """Admits a request that has its blocks already."""
        num_tokens = self._first_span(request.num_tokens - request.num_computed_tokens, plan.budget)
        if num_tokens:
            self._waiting.remove(request)
            self._run(request, plan, num_tokens)
        return bool(num_tokens)

    def _external_tokens(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """(tokens that the connector loads, in whole blocks, or None for `ask again`; whether beside the steps)."""
        if request.params.prompt_logprobs is not None or request in self._load_no_more:
            return 0, False
        count, is_async = self._connector.matched_tokens(request, num_local)
        if count is None:
            return None, False
        most = request.num_tokens - 1 - num_local
        count = min(count, most) // self._block_size * self._block_size
        return count, is_async and count > 0

    def _first_span(self, remaining: int, budget: int) -> int:
        whole_first = not self._ctx.chunked_prefill and remaining <= self._ctx.max_num_batched_tokens
        return 0 if whole_first and remaining > budget else min(remaining, budget)

    def _num_claimed(self, hits: Sequence[Sequence[int]], new: Sequence[range], rest: range) -> int:
        """Free blocks that a request needs to compute its known tokens without a break: those of new columns, hits that
        nobody holds, and what a window grows by in the steps behind the first, which compute `rest`."""
        idle = (self.pool.num_idle(blocks) for blocks in hits)
        taken = [len(columns) + count for columns, count in zip(new, idle, strict=True)]
        num_columns, budget = self._num_blocks(rest.stop), self._ctx.max_num_batched_tokens
        return sum(taken) + sum(
            min(num_columns - new[g].stop, max(0, self._groups.most_columns(g, rest, budget) - taken[g]))
            for g in self._groups.sliding
        )

    def _leaves_room(self, request: Request, num_claimed: int) -> bool:
        """Whether the running requests keep blocks to grow into, or would yield to `request` anyhow.

        True as well for a request that does not fit at all: then the policy decides who yields.
        """
        left = self.pool.num_free - num_claimed
        if left < 0 or left >= len(self._running) * self._num_groups:
            return True
        return left >= self._num_reserved() or self._policy.victim([*self._running, request]) is not request

    def _num_reserved(self) -> int:
        """A block in each group for each running request that grows. All that they know is scheduled by now, or nobody
        is admitted: a prompt that was cut has used the budget up."""
        shortest, size = self._shortest, self._block_size
        return self._num_groups * sum(r.max_total_tokens > len(r.block_ids[shortest]) * size for r in self._running)

    def _take_blocks(
        self, request: Request, hits: list[list[int]], new: Sequence[range], num_computed: int, num_external: int
    ) -> None:
        """Begins a stay: gives a waiting request, which waits no longer, its hits and blocks for the new columns."""
        num_hits = len(hits[0])
        if request.num_cached_tokens < 0:  # allocating may evict what stands there
            self._counts["prefix_recomputed_tokens"] += self._cache.num_passed_over(request) * self._block_size
        for blocks in hits:
            self.pool.acquire(blocks)
        for blocks, columns in zip(hits, new, strict=True):
            blocks.extend([NULL_BLOCK] * (columns.start - num_hits))
            blocks.extend(self.pool.allocate(len(columns)))
            self.pool.write(blocks[columns.start : self._num_blocks(num_computed)])  # loaded, swapped or copied into
        self._waiting.remove(request)
        request.lease, self._next_lease = self._next_lease, self._next_lease + 1
        request.block_ids = hits
        request.num_published_blocks = num_hits
        request.num_computed_tokens = num_computed
        self._swap.swap_in(request, hits, num_hits)
        if num_external:
            self._loads[request] = range(num_hits, num_computed // self._block_size)
        self._connector.after_alloc(request, hits, num_external)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self._counts["prefix_query_tokens"] += request.num_tokens
            self._counts["prefix_hit_tokens"] += num_hits * self._block_size
            self._counts["connector_hit_tokens"] += num_external

    def _run(self, request: Request, plan: StepPlan, num_tokens: int) -> None:
        """Gives a request with blocks a row and its first span."""
        self._running.append(request)
        request.req_idx = self._free_rows.pop()
        request.status = _RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.perf_counter()
        plan.new.append(request)
        plan.columns[request] = [0] * self._num_groups
        plan.add(request, num_tokens)

    def _emit(self, plan: StepPlan) -> StepRecord:
        step = plan.emit(self._next_step_id, self._num_groups, self._leaving)
        self._leaving = Leaving()
        starts = step.scheduled.num_computed_tokens.tolist()
        for request, start, num_tokens in zip(step.requests, starts, plan.spans.values(), strict=True):
            if num_tokens > 1 or not start % self._block_size:
                for blocks in request.block_ids:
                    self.pool.write(blocks[start // self._block_size : self._num_blocks(start + num_tokens)])
        self._swap.emit(step.scheduled.block_ops)
        return step

    # -------------------------------------------------------------------------------------------- update

    def update(self, scheduled: SchedulerOutput, output: StepOutput) -> Sequence[NewTokens]:
        """Commits the oldest step in flight: publishes its blocks, appends its tokens, ends requests.

        Returns an entry for each request that got tokens or ended. Rows of requests that were aborted or preempted
        since the step was made are dropped.
        """
        step = self._ledger.pop(scheduled)
        if step.sources:
            self.pool.free(step.sources)
        if output.is_lost:
            self._lose(scheduled, scheduled.connector_meta)
        if output.connector is not None:
            self._take_transfers(output.connector)  # first: rows of a failed load draw nothing
        news = self._commit(step, output)
        if self._compiling and not output.is_lost:  # what is told of a lost step is not heard
            news = [*news, *self._end_uncompiled()]
        for kept in self._ledger.release(scheduled.step_id):
            self._free_rows.append(kept.row)
            if not self._parked.take_over(kept.lease, kept.blocks):
                self.pool.free(kept.blocks)
        return news

    def _commit(self, step: StepRecord, output: StepOutput) -> Sequence[NewTokens]:
        goes_on = step.scheduled.only_decodes and gives_one_each(output, len(step.requests))
        if goes_on and self._commit_course(step, output):
            return OneEach(step.requests, output.sampled, output.logprobs is not None, self._settle)
        self._settle()  # these tokens come behind those that the course keeps
        if goes_on and self._commit_decodes(step, output):
            return OneEach(step.requests, output.sampled, output.logprobs is not None, self._settle)
        return self._commit_rows(step, output)

    def _commit_course(self, step: StepRecord, output: StepOutput) -> bool:
        """Leaves the tokens of a step of the present course to it; False when one of them may end a request."""
        course = self._course
        if course is None or step.course is not course or course.may_end(output.sampled):
            return False
        if step.filling is not None and self._commits_at_once:
            course.tell(step.filling)  # the keys of blocks are made of their tokens
            for request in step.filling.requests:
                self._commit_blocks(request, request.num_published_blocks + 1)
        course.take(step.scheduled, output.sampled)
        if self._is_watched or course.is_full:
            self._settle()
        return True

    def _commit_decodes(self, step: StepRecord, output: StepOutput) -> bool:
        """Gives each request its token when all of them go on; else changes nothing, and answers False."""
        tokens = output.sampled[:, 0].tolist()
        for request, generation, token in zip(step.requests, step.generations, tokens, strict=True):
            is_here = request.status is _RUNNING and request.num_preemptions == generation
            if not is_here or request.constraint is not None or not stays(request, token):
                return False
        num_blocks = ((step.scheduled.num_computed_tokens + 1) // self._block_size).tolist()
        for request, token, count in zip(step.requests, tokens, num_blocks, strict=True):
            if count > request.num_published_blocks:
                self._commit_blocks(request, count)
            request.num_in_flight -= 1
            request.token_ids.append(token)
        return True

    def _commit_and_give_up(self, request: Request, num_blocks: int) -> None:
        """Commits and publishes the request's blocks up to num_blocks, and frees those that fall behind a window."""
        self._cache.commit(request, num_blocks)
        self.pool.free(self._groups.give_up(request.block_ids, num_blocks * self._block_size))

    def _commit_rows(self, step: StepRecord, output: StepOutput) -> list[NewTokens]:
        news: list[NewTokens] = []
        sampled, num_valid, errors = output.sampled.tolist(), output.num_valid.tolist(), output.errors
        scheduled = step.scheduled
        ends = (scheduled.num_computed_tokens + scheduled.num_scheduled_tokens).tolist()
        samples = scheduled.samples.tolist()
        columns = zip(step.requests, step.generations, ends, samples, sampled, num_valid, strict=True)
        next_row = 0
        for i, (request, generation, end, draws, tokens, count) in enumerate(columns):
            logprobs_row, next_row = next_row, next_row + count
            if request.status is not _RUNNING or request.num_preemptions != generation:
                continue
            if errors and i in errors:
                news.append(self._fail(request, errors[i]))
                continue
            num_blocks = end // self._block_size
            if num_blocks > request.num_published_blocks:
                self._commit_blocks(request, num_blocks)
            if draws:
                if count == len(tokens) == 1 and stays(request, tokens[0]) and request.constraint is None:
                    request.num_in_flight -= 1
                    request.token_ids.append(tokens[0])
                    new = NewTokens(request, tokens)
                else:
                    new = self._take(request, tokens if len(tokens) == count else tokens[:count])
                if output.logprobs is not None and request.params.asks_logprobs:
                    new.logprobs_row = logprobs_row
                if output.prompt_logprobs:
                    new.prompt_logprobs = output.prompt_logprobs.get(i)
                if output.told:
                    new.payloads = _told_of_rows(output.told, logprobs_row, len(new.token_ids))
                news.append(new)
        return news

    def _take(self, request: Request, tokens: list[int]) -> NewTokens:
        assert tokens, f"request {request.request_id}: its row samples, but the step returned no token and no error"
        request.num_in_flight -= 1
        taken, reason, stop_reason = append_tokens(request, tokens)
        is_over = False
        if request.constraint is not None:
            is_over = reason != "stop" and request.constraint.take(taken, request.num_output_tokens)
            if request.constraint.error is not None:  # an ending too: the mask that allowed it was none
                return self._fail(request, request.constraint.error)
            reason = "stop" if is_over else reason
        if reason is not None:
            self._finish(request, reason, stop_reason)
        return NewTokens(request, taken, reason, stop_reason, ends_in_text=is_over)

    def _fail(self, request: Request, error: str) -> NewTokens:
        """Ends a running request whose last tokens count for nothing."""
        self._finish(request, "error", error=error)
        return NewTokens(request, [], "error", error=error)

    def _end_uncompiled(self) -> list[NewTokens]:
        """Ends requests whose grammar could not be compiled, and forgets those that have theirs."""
        news = []
        for request, constraint in list(self._compiling.items()):
            if constraint.is_ready():
                del self._compiling[request]
            elif constraint.error is not None:
                request.error = constraint.error
                self._waiting.remove(request)
                self._end(request, "error")
                news.append(NewTokens(request, [], "error", error=request.error))
        return news

    def _finish(self, request: Request, reason: str, stop_reason: int | None = None, error: str | None = None) -> None:
        request.stop_reason, request.error = stop_reason, error
        self._leaving.finished.append(request.req_idx)
        self._stop_running(request)
        self._end(request, reason)

    def _end(self, request: Request, reason: str) -> None:
        del self._requests[request.request_id]
        if request.constraint is not None:
            self._num_constrained -= 1
            self._compiling.pop(request, None)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_in_flight = 0
        self._swap.drop(request)
        self._load_no_more.discard(request)
        if request.block_ids:
            self._give_up(request, self._connector.request_finished(request, request.block_ids))

    def _give_up(self, request: Request, is_kept: bool) -> None:
        """Takes row and blocks from a request.

        They are reused once the last step that names them is done, and blocks when the connector has reported them:
        those that it keeps, and those that it is filling.
        """
        row, request.req_idx = request.req_idx, -1
        self._loads.pop(request, None)
        blocks, request.block_ids = in_token_order(request.block_ids), []
        is_loading = self._parked.loading.pop(request.lease, None) is not None
        last = None if row < 0 else self._ledger.last_naming(request)
        if is_kept or is_loading:
            self._parked.keep(request.lease, blocks if last is None else None, is_kept + is_loading)
        if last is not None:
            self._ledger.keep(Kept(last, row, blocks, request.lease))
            return
        if row >= 0:
            self._free_rows.append(row)
        if not (is_kept or is_loading):
            self.pool.free(blocks)

    # ------------------------------------------------------------------------------------------- connector

    def _take_transfers(self, transfers: Transfers) -> None:
        """What the connector's worker side reports."""
        failed = set(transfers.failed)
        if failed:
            self._parked.fail(failed)
            for request in [r for r in self._running if _first_in(r.block_ids, failed) is not None]:
                self._compute_instead(request, failed)
        for lease in transfers.received:
            loading = self._parked.loading.pop(lease, None)
            if loading is None:
                self.pool.free(self._parked.report(lease))
            else:
                self._take_loaded(loading)
        for lease in transfers.sent:
            self.pool.free(self._parked.report(lease))

    def _take_loaded(self, loading: Loading) -> None:
        """The request waits for a row now, and for its blocks as well when some of them have not come."""
        request = loading.request
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        insort_left(self._waiting, request, key=_by_arrival)
        if loading.failed:
            self._commit_loaded(request, loading.failed)
            self._drop_loaded(request)
        else:
            self._cache.commit(request, request.num_computed_tokens // self._block_size)

    def _drop_loaded(self, request: Request) -> None:
        """The request waits for blocks again."""
        self._uncount(request)
        self._give_up(request, self._connector.request_preempted(request, request.block_ids))
        request.num_computed_tokens = request.num_published_blocks = 0

    def _compute_instead(self, request: Request, failed: Set[int]) -> None:
        """Sends a running request back, which computes what its load has not brought; tokens in flight are dropped."""
        self._commit_loaded(request, failed)
        self._send_back(request)

    def _commit_loaded(self, request: Request, failed: Set[int]) -> None:
        """Commits what has come before the first block that failed. The request loads nothing more."""
        count, columns = _first_in(request.block_ids, failed), self._loads.get(request, range(0))
        text = f"request {request.request_id}: block {count} has failed, but {columns} are loaded"
        assert count is not None and count in columns, text
        if count > request.num_published_blocks:
            self._cache.commit(request, count)
        self._uncount(request)
        self._load_no_more.add(request)
        self._counts["num_failed_loads"] += 1

    def _uncount(self, request: Request) -> None:
        """Takes back what a first admission counted: its loads have not come, or are given up before anybody read them.
        The next admission is the first one then."""
        if request.num_preemptions or request.num_cached_tokens < 0:
            return
        num_external = len(self._loads[request]) * self._block_size
        self._counts["prefix_query_tokens"] -= request.num_tokens
        self._counts["prefix_hit_tokens"] -= request.num_cached_tokens - num_external
        self._counts["connector_hit_tokens"] -= num_external
        request.num_cached_tokens = -1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _told_of_rows(told: Mapping[str, list[Any]], first: int, count: int) -> dict[str, list[Any]]:
    """{stage: entries of `count` logits rows from `first` on} of the observe stages that the request wants."""
    rows = {key: entries[first : first + count] for key, entries in told.items()}
    return {key: entries for key, entries in rows.items() if any(entry is not None for entry in entries)}


def _first_in(block_ids: Sequence[Sequence[int]], blocks: Set[int]) -> int | None:
    """Index of the first column of `block_ids`, one list a KV group, that holds one of `blocks`."""
    return next((i for i, column in enumerate(zip(*block_ids, strict=True)) if not blocks.isdisjoint(column)), None)
