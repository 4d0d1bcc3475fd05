"""Requests and contexts of these tests, and the shadow runner: a machine that holds a value for every KV slot.

The value of a token's slot depends on the whole prefix and on salt and adapter, as KV does. The shadow executes a step
only when its result is asked for, so that everything in flight is really not there yet. A connector of the shadow moves
these values: late, out of order, beside the steps, or not at all.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partialmethod
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from framework.batch import NULL_BLOCK, StepOutput, Transfers
from framework.interfaces import KVGroup, SchedulerContext
from framework.nulls import NoConnector
from framework.request import Request, RequestStatus, SamplingParams
from framework.scheduler import BlockState, Scheduler, extend_hashes
from framework_schedulers.policies import Fcfs, Priority, Shortest

VOCAB = 50
POLICIES = {"fcfs": Fcfs, "priority": Priority, "shortest": Shortest}


class Moody:
    """Answers like `policy`; raises once it has given `num_answers`, if that is set."""

    def __init__(self, policy):
        self.policy, self.num_answers = policy, None

    def ask(self, method, *args):
        if self.num_answers == 0:
            raise RuntimeError("moody")
        if self.num_answers is not None:
            self.num_answers -= 1
        return getattr(self.policy, method)(*args)

    order = partialmethod(ask, "order")
    admit = partialmethod(ask, "admit")
    victim = partialmethod(ask, "victim")


def make_request(name, prompt, max_tokens=4, *, arrival=0, params=None, **fields):
    params = params or SamplingParams(max_tokens=max_tokens)
    prompt = list(prompt)
    return Request(
        name, prompt, params, seed=0, max_total_tokens=len(prompt) + max_tokens, arrival_index=arrival, **fields
    )


def make_context(**changes):
    block_size = changes.pop("block_size", 4)
    policy = changes.pop("policy", "fcfs")
    windows = changes.pop("windows", (None,) * changes.pop("num_groups", 1))
    values = {
        "groups": tuple(
            KVGroup(f"g{i}", "full" if window is None else "sliding", block_size, window)
            for i, window in enumerate(windows)
        ),
        "num_blocks": 33,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "chunked_prefill": True,
        "prefix_caching": True,
        "policy": Moody(POLICIES[policy]({}, None)) if isinstance(policy, str) else policy,
        "connector": NoConnector(),
    }
    return SchedulerContext(**{**values, **changes})


def value_after(value, token):
    return hash((value, token))


def root_value(request):
    return crc32(repr((request.lora, request.cache_salt)).encode())


def draw(value):
    return value % VOCAB


def expected_output(request):
    """(tokens, finish reason) of a request that runs alone."""
    value = root_value(request)
    for token in request.prompt_token_ids:
        value = value_after(value, token)
    tokens = []
    while True:
        tokens.append(draw(value))
        value = value_after(value, tokens[-1])
        if tokens[-1] in request.eos_token_ids | request.stop_token_ids:
            return tokens, "stop"
        if request.num_prompt_tokens + len(tokens) == request.max_total_tokens:
            return tokens, "length"


@dataclass
class Row:
    """One row of the runner's request table; `tokens` grows when a step is executed. tables: of each KV group, with the
    null block where no later step reads."""

    request: Request
    tokens: list
    tables: list
    num_issued: int
    is_spoilt: bool = False  # a load of its blocks has failed: what it draws means nothing

    def values(self, count):
        value, out = root_value(self.request), []
        for token in self.tokens[:count]:
            value = value_after(value, token)
            out.append(value)
        return out


@dataclass
class Issued:
    scheduled: object
    spans: list  # (row number, row, tables as they are in this step, start, end, samples)
    blocks: set = field(default_factory=set)


class ShadowConnector(NoConnector):
    """Stores values under prefix keys, with every delay and fault that the contract allows.

    Its worker side is `execute`, which the shadow calls with the metadata of a step and gives the transfers of.
    """

    def __init__(self, seed, block_size, num_groups):
        self.random, self.block_size, self.groups = random.Random(seed), block_size, range(num_groups)
        self.store, self.stays, self.planned, self.asked = {}, {}, {}, Counter()
        self.loads, self.saves, self.ended, self.counts = [], [], set(), Counter()
        self.late_loads, self.late_saves = [], []  # begun by a step, done by a later one

    def keys(self, request, first, last):
        extend_hashes(request, last, self.block_size)
        return [[(digest, group) for group in self.groups] for digest in request.block_hashes[first:last]]

    def matched_tokens(self, request, num_computed_tokens):
        self.asked[request.request_id, request.num_preemptions] += 1
        if self.asked[request.request_id, request.num_preemptions] < request.arrival_index % 3:
            return None, False
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        count = 0
        for column in self.keys(request, first, last):
            if not all(key in self.store for key in column):
                break
            count += 1
        return count * self.block_size, count > 0 and request.arrival_index % 2 == 0

    def after_alloc(self, request, blocks, num_external_tokens):
        assert request.lease not in self.stays and request.lease == len(self.planned)
        self.stays[request.lease], self.planned[request.lease] = request, request.num_computed_tokens // self.block_size
        last = request.num_computed_tokens // self.block_size
        first = last - num_external_tokens // self.block_size
        if num_external_tokens:
            columns = [[group[i] for group in blocks] for i in range(first, last)]
            is_async = request.arrival_index % 2 == 0
            self.loads.append((request.lease, self.keys(request, first, last), columns, is_async))

    def build_meta(self, scheduled):
        for lease, request in self.stays.items():
            self.plan(lease, request, request.block_ids)
        meta, self.loads, self.saves = (self.loads, self.saves), [], []
        return meta

    def plan(self, lease, request, blocks):
        first, last = self.planned[lease], request.num_published_blocks
        if last > first:
            self.planned[lease] = last
            columns = [[group[i] for group in blocks] for i in range(first, last)]
            self.saves.append((lease, self.keys(request, first, last), columns))
            self.counts[lease] += 1

    def request_finished(self, request, blocks):
        lease = request.lease
        del self.stays[lease]
        self.plan(lease, request, blocks)
        if self.counts[lease]:
            self.ended.add(lease)
        return bool(self.counts[lease])

    request_preempted = request_finished

    def step_lost(self, meta):
        loads, saves = meta
        for lease, *_ in saves:
            self.counts[lease] -= 1
        self.late_loads += [(lease, [], columns) for lease, _, columns, is_async in loads if is_async]

    def execute(self, meta, shadow):
        loads, saves = meta
        result = Transfers([], [], [])
        self.late_loads += [load[:3] for load in loads if load[3]]
        self.random.shuffle(self.late_loads)
        for _, keys, columns, _ in (load for load in loads if not load[3]):
            self.load(keys, columns, shadow, result)
        while self.late_loads and self.random.random() < 0.6:
            lease, keys, columns = self.late_loads.pop()
            self.load(keys, columns, shadow, result)
            result.received.append(lease)
        self.late_saves += saves
        self.random.shuffle(self.late_saves)
        while self.late_saves and self.random.random() < 0.6:
            self.save(*self.late_saves.pop(), shadow)
        result.sent += [lease for lease in self.ended if not self.counts[lease]]
        self.ended -= set(result.sent)
        return result

    def load(self, keys, columns, shadow, result):
        if self.random.random() < 0.2:
            keys = []
        for i, column in enumerate(columns):
            for group, block in enumerate(column):
                values = self.store.get(keys[i][group]) if i < len(keys) else None
                if values is None:
                    result.failed.append(block)
                shadow.fill(group, block, values)

    def save(self, lease, keys, columns, shadow):
        self.counts[lease] -= 1
        for column_keys, column in zip(keys, columns, strict=True):
            for group, (key, block) in enumerate(zip(column_keys, column, strict=True)):
                slots = range(block * self.block_size, (block + 1) * self.block_size)
                values = [shadow.memory.get((group, slot)) for slot in slots]
                assert shadow.value_of_key.setdefault(key, tuple(values)) == tuple(values), "another's KV was stored"
                self.store[key] = values
        if self.random.random() < 0.1 and self.store:
            del self.store[self.random.choice(list(self.store))]


class Shadow:
    """A scheduler and a runner without a model; every rule is checked again after each call."""

    def __init__(self, connector_seed=None, **changes):
        self.connector = None
        if connector_seed is not None:
            sizes = changes.get("block_size", 4), len(changes.get("windows", [None] * changes.get("num_groups", 1)))
            self.connector = changes["connector"] = ShadowConnector(connector_seed, *sizes)
        self.ctx = make_context(**changes)
        self.scheduler = Scheduler({}, self.ctx)
        self.block_size = self.ctx.groups[0].block_size
        self.rows, self.in_flight, self.requests, self.news, self.errors = {}, deque(), {}, [], {}
        self.memory = {}  # (group, slot) -> value, only of steps that came back
        self.host_memory = {}  # (group, host block) -> values
        self.value_of_key = {}
        self.last, self.last_rows = None, []  # the step issued last, and who ran in it
        self.arrived_with = {}  # tokens whose KV was there at the beginning of a stay, by lease

    def add(self, request):
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request

    def abort(self, name):
        request = self.scheduler.abort(name)
        self.check()
        return request

    def stop(self, name):
        request = self.scheduler.stop(name, "stop string")
        self.check()
        return request

    # ------------------------------------------------------------------------------------------- issuing

    def issue(self):
        scheduled = self.scheduler.schedule()
        for number in scheduled.finished + scheduled.preempted + scheduled.aborted:
            del self.rows[number]
        self._arrive(scheduled)
        self._append_blocks(scheduled)
        self._check_limits(scheduled)
        self._check_moves(scheduled)
        self._check_course(scheduled)
        spans = [self._span(scheduled, i) for i in range(scheduled.num_rows)]
        blocks = {block for _, _, tables, *_ in spans for table in tables for block in table}
        self.in_flight.append(Issued(scheduled, spans, blocks))
        self.check()
        return scheduled

    def _arrive(self, scheduled):
        named = {number for issued in self.in_flight for number, *_ in issued.spans}
        for new in scheduled.new:
            assert 1 <= new.req_idx <= self.ctx.max_num_seqs and new.req_idx not in self.rows
            assert new.req_idx not in named, "row reused while a step in flight names it"
            request = self.requests[new.request_id]
            assert new.token_ids.tolist() == request.token_ids and new.num_prompt_tokens == request.num_prompt_tokens
            assert new.num_computed_tokens < len(new.token_ids)
            assert new.num_computed_tokens % self.block_size == 0 or request.siblings
            assert new.num_computed_tokens == 0 or request.params.prompt_logprobs is None
            self.arrived_with[request.lease] = new.num_computed_tokens
            tables = [[] for _ in self.ctx.groups]
            self.rows[new.req_idx] = Row(request, new.token_ids.tolist(), tables, new.num_computed_tokens)

    def first_read(self, group, position):
        """The first position that a query at `position` reads."""
        window = self.ctx.groups[group].window
        return 0 if window is None else max(0, position - window + 1)

    def prune(self, table, group, num_tokens):
        """The table with the null block in place of blocks that nobody reads behind num_tokens tokens."""
        first = self.first_read(group, num_tokens) // self.block_size
        return [NULL_BLOCK if column < first else block for column, block in enumerate(table)]

    def _append_blocks(self, scheduled):
        busy = set().union(*(issued.blocks for issued in self.in_flight)) if self.in_flight else set()
        cached = {new.req_idx: self.requests[new.request_id].num_published_blocks for new in scheduled.new}
        assert len(scheduled.new_block_ids) == len(self.ctx.groups)
        for group, delta in enumerate(scheduled.new_block_ids):
            ids = delta.ids.tolist()
            assert len(ids) == delta.counts.sum()
            for number, start, count in zip(delta.rows, delta.starts, delta.counts, strict=True):
                mine, ids = ids[:count], ids[count:]
                row, hits = self.rows[number], cached.get(number, 0)
                assert start == len(row.tables[group])
                row.tables[group] += mine
                values, first = row.values(hits * self.block_size), self.first_read(group, row.num_issued)
                slots = self._slots(row.tables[group], min(first, len(values)), len(values))
                got = [self.memory.get((group, slot)) for slot in slots]
                assert got == values[first:], "hit on a block that is not computed, or not this prefix"
                held = Counter(b for other in self.rows.values() for table in other.tables for b in table)
                for column, block in enumerate(mine, start):
                    if start == 0 and column < max(hits, first // self.block_size):
                        continue
                    assert block != NULL_BLOCK and held[block] == 1, f"block {block} handed out twice"
                    assert block not in busy, f"block {block} reused while a step in flight names it"

    def _check_moves(self, scheduled):
        out, back = scheduled.block_ops.swap_out, scheduled.block_ops.swap_in
        hosts = [host for _, host in out] + [host for host, _ in back]
        assert len(set(hosts)) == len(hosts) and all(0 <= host < self.ctx.num_swap_blocks for host in hosts)

    def _check_limits(self, scheduled):
        assert scheduled.num_tokens <= self.ctx.max_num_batched_tokens
        assert len(set(scheduled.rows.tolist())) == scheduled.num_rows <= self.ctx.max_num_seqs
        assert (
            scheduled.rows.dtype
            == scheduled.num_scheduled_tokens.dtype
            == scheduled.num_computed_tokens.dtype
            == np.int32
        )
        assert scheduled.samples.dtype == np.bool_ and scheduled.num_drafts.tolist() == [0] * scheduled.num_rows
        if not self.ctx.chunked_prefill:
            for number, count, samples in zip(
                scheduled.rows, scheduled.num_scheduled_tokens, scheduled.samples, strict=True
            ):
                resumed = self.rows[number].request.num_preemptions > 0
                assert samples or resumed, f"prompt of row {number} cut to {count} tokens"

    def _check_course(self, scheduled):
        ones = scheduled.num_scheduled_tokens.tolist() == [1] * scheduled.num_rows
        assert scheduled.only_decodes == bool(ones and scheduled.num_rows and scheduled.samples.all())
        last, self.last = self.last, scheduled
        if scheduled.goes_on:
            assert last.only_decodes and scheduled.only_decodes
            assert scheduled.rows.tolist() == last.rows.tolist()
            assert (scheduled.num_computed_tokens == last.num_computed_tokens + 1).all()
            assert not (scheduled.new or scheduled.finished or scheduled.preempted or scheduled.aborted)
            assert not scheduled.block_ops and scheduled.num_prompt_tokens == 0
            assert all(self.rows[number] is row for number, row in self.last_rows), "a row was overwritten"
        self.last_rows = [(number, self.rows[number]) for number in scheduled.rows.tolist()]

    def _span(self, scheduled, i):
        number, start = int(scheduled.rows[i]), int(scheduled.num_computed_tokens[i])
        end, row = start + int(scheduled.num_scheduled_tokens[i]), self.rows[number]
        assert start == row.num_issued and start < end < row.request.max_total_tokens
        row.num_issued = end
        assert all(len(table) * self.block_size >= end for table in row.tables)
        tables = [self.prune(table, group, start) for group, table in enumerate(row.tables)]
        return number, row, tables, start, end, bool(scheduled.samples[i])

    # ------------------------------------------------------------------------------------------ executing

    def commit(self):
        issued = self.in_flight.popleft()
        self._move(issued.scheduled.block_ops)
        transfers = self.connector and self.connector.execute(issued.scheduled.connector_meta, self)
        failed = set(transfers.failed if transfers else ())
        sampled = np.zeros((len(issued.spans), 1), np.int32)
        num_valid = np.zeros(len(issued.spans), np.int32)
        errors = {}
        for i, (_, row, tables, start, end, samples) in enumerate(issued.spans):
            row.is_spoilt |= not failed.isdisjoint(block for table in tables for block in table)
            if not row.is_spoilt:
                self._execute(row, tables, start, end)
            assert samples == (end == len(row.tokens))
            if samples:
                sampled[i], num_valid[i] = draw(row.values(end)[-1]) if not row.is_spoilt else VOCAB + 1, 1
                row.tokens.append(int(sampled[i, 0]))
            if row.request.request_id in self.errors:
                errors[i] = self.errors[row.request.request_id]  # beside a token that means nothing
        output = StepOutput(sampled, num_valid, errors=errors, connector=transfers)
        news = self.scheduler.update(issued.scheduled, output)
        self.news += news
        for number, row, _, _, end, _ in issued.spans:
            whole = end // self.block_size * self.block_size
            row.tables = [self.prune(table, group, whole) for group, table in enumerate(row.tables)]
            if self.rows.get(number) is row and row.request.status is RequestStatus.RUNNING and not row.is_spoilt:
                assert row.request.num_published_blocks == end // self.block_size, "computed blocks are not published"
        self.check()
        return news

    def lose(self):
        """The steps in flight fail, as they do in an engine: what runs is aborted, and nothing was done for sure."""
        for request in self.running():
            self.abort(request.request_id)
        self._drop_steps()

    def restart(self, ended=()):
        """The steps in flight fail because of the requests named `ended`: the others that ran begin anew."""
        for name in ended:
            self.abort(name)
        self.scheduler.restart()
        self.check()
        self._drop_steps()

    def fail_to_issue(self, num_answers):
        """The policy raises instead of its next answer but `num_answers`, if the step asks it so often."""
        self.ctx.policy.num_answers = num_answers
        try:
            self.issue()
        except RuntimeError:
            self.check()
            self.lose()
        self.ctx.policy.num_answers = None

    def running(self):
        return [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]

    def _drop_steps(self):
        while self.in_flight:
            issued = self.in_flight.popleft()
            none = np.zeros((len(issued.spans), 1), np.int32)
            self.scheduler.update(issued.scheduled, StepOutput(none, none[:, 0], is_lost=True))
            self.check()

    def fill(self, group, block, values):
        for i in range(self.block_size):
            self.memory[group, block * self.block_size + i] = values[i] if values else "never loaded"

    def _move(self, ops):
        """Swaps blocks out and in, and copies some."""
        for block, host in ops.swap_out:
            for group in range(len(self.ctx.groups)):
                slots = range(block * self.block_size, (block + 1) * self.block_size)
                self.host_memory[group, host] = [self.memory.get((group, slot)) for slot in slots]
        sources = [source for source, _ in ops.copy]
        targets = [target for _, target in ops.copy]
        assert set(sources).isdisjoint(targets) and len(set(targets)) == len(targets), "copies in no order"
        for source, block in ops.copy:
            for group in range(len(self.ctx.groups)):
                slots = range(source * self.block_size, (source + 1) * self.block_size)
                self.fill(group, block, [self.memory.get((group, slot)) for slot in slots])
        for host, block in ops.swap_in:
            for group in range(len(self.ctx.groups)):
                self.fill(group, block, self.host_memory[group, host])

    def _execute(self, row, tables, start, end):
        values = row.values(end)
        assert len(values) == end, "a token is computed before it is known"
        for group, table in enumerate(tables):
            for position in range(start, end):
                self.memory[group, self._slots(table, position, position + 1)[0]] = values[position]
            first = self.first_read(group, start)
            slots = self._slots(table, first, end)
            assert all(slot >= self.block_size for slot in slots), "the null block is read inside of a window"
            assert [self.memory.get((group, slot)) for slot in slots] == values[first:]

    def _slots(self, table, start, end):
        return [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]

    # ------------------------------------------------------------------------------------------- checking

    def check(self):
        """Derives reference counts, free blocks, rows and published content anew."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        kept = scheduler._ledger._kept
        holders = Counter(b for r in scheduler._running for blocks in r.block_ids for b in blocks if b != NULL_BLOCK)
        holders.update(b for k in kept for b in k.blocks)
        holders.update(scheduler._course.untold_blocks() if scheduler._course else ())
        holders.update(b for step in scheduler._ledger._steps for b in step.sources)
        holders.update(b for kept in scheduler._parked._kept.values() for b in kept.blocks or ())
        holders.update(b for r in self._parked_requests() for blocks in r.block_ids for b in blocks)
        assert [pool.ref_count(b) for b in range(pool.num_blocks)] == [holders[b] for b in range(pool.num_blocks)]
        assert pool.num_free == sum(not holders[b] for b in range(1, pool.num_blocks)), "a block leaked"
        assert (
            scheduler._swap.num_free
            + sum(block >= 0 for held in scheduler._swap._host_blocks.values() for host in held for block in host)
            == self.ctx.num_swap_blocks
        ), "a host block leaked"
        rows = [r.req_idx for r in scheduler._running] + [k.row for k in kept] + scheduler._free_rows
        assert sorted(rows) == list(range(1, self.ctx.max_num_seqs + 1)), "a row leaked"
        arrivals = [r.arrival_index for r in scheduler._waiting]
        assert arrivals == sorted(arrivals)
        assert all(
            r.status is RequestStatus.RUNNING and r.num_in_flight <= self.ctx.max_in_flight for r in scheduler._running
        )
        self._check_published()
        for request in scheduler._running:
            self._check_windows(request)

    def _check_windows(self, request):
        """What lies behind a window is given up with the block that pushes it out, and nothing before."""
        whole = request.num_published_blocks * self.block_size
        for group in (g for g, kind in enumerate(self.ctx.groups) if kind.window is not None):
            held = [block != NULL_BLOCK for block in request.block_ids[group]]
            first = self.first_read(group, whole) // self.block_size
            assert not any(held[:first]), "a block behind a window is kept"
            arrived = max(whole, self.arrived_with.get(request.lease, 0))
            assert all(held[self.first_read(group, arrived) // self.block_size :]), "a block inside of a window is gone"

    def _parked_requests(self):
        """Requests that hold blocks and no row: those that wait for a load, and those that had one."""
        loading = [one.request for one in self.scheduler._parked.loading.values()]
        return [*loading, *(r for r in self.scheduler._waiting if r.block_ids)]

    def _check_published(self):
        pool = self.scheduler.pool
        found = pool.published()
        assert len(set(found.values())) == len(found)
        for key, block in found.items():
            assert pool.state(block) is BlockState.PUBLISHED
            slots = range(block * self.block_size, (block + 1) * self.block_size)
            values = tuple(self.memory.get((key[1], slot)) for slot in slots)
            assert None not in values, "published before it was computed"
            assert self.value_of_key.setdefault(key, values) == values

    # -------------------------------------------------------------------------------------------- running

    def step(self):
        """One step with as many in flight as the context allows."""
        while len(self.in_flight) >= self.ctx.max_in_flight:
            self.commit()
        scheduled = self.issue()
        if len(self.in_flight) == self.ctx.max_in_flight:
            self.commit()
        return scheduled

    def drain(self, max_steps=3000):
        """Runs until nothing is left; every request must have ended as it does alone."""
        while self.scheduler.has_work():
            max_steps -= 1
            assert max_steps, "requests do not finish"
            self.step()
        while self.in_flight:
            self.commit()
        assert not self.scheduler.has_work()
        assert self.scheduler.pool.num_free == self.ctx.num_blocks - 1
        assert self.scheduler._swap.num_free == self.ctx.num_swap_blocks
        assert len(self.scheduler._free_rows) == self.ctx.max_num_seqs
        for request in self.requests.values():
            assert request.status is RequestStatus.FINISHED
            if request.finish_reason in ("stop", "length") and request.stop_reason != "stop string":
                assert (request.output_token_ids, request.finish_reason) == expected_output(request)
                assert self.tokens_of(request.request_id) == request.output_token_ids

    def tokens_of(self, name):
        return [t for new in self.news if new.request.request_id == name for t in new.token_ids]


@pytest.fixture(scope="session")
def sim():
    """What the tests of this folder share."""
    return SimpleNamespace(
        Shadow=Shadow,
        request=make_request,
        context=make_context,
        expected_output=expected_output,
        vocab=VOCAB,
        policies=POLICIES,
    )
