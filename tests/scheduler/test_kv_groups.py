"""Groups with a window: what a request holds of them, what it gives up, and hits that every group can go on from."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from framework.errors import RequestError
from framework.interfaces import KVGroup
from framework.nulls import NoConnector
from framework.request import RequestStatus, SamplingParams
from framework.scheduler import PrefixCache, Scheduler
from framework.scheduler.kv_groups import KVGroups, in_token_order, num_held

SIZE = 4


def groups(*windows, size=SIZE):
    kinds = ["full" if window is None else "sliding" for window in windows]
    return KVGroups([KVGroup(f"g{i}", kinds[i], size, window) for i, window in enumerate(windows)])


# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_block_is_needed_as_long_as_a_later_token_reads_one_of_its_positions(window, size):
    of = groups(window, size=size)
    for computed in range(25):
        read = range(max(0, computed - window + 1), computed + 1)  # by the next token; later ones read no more of it
        assert of.first_needed(0, computed) == read.start // size


@pytest.mark.parametrize("window, run", [(1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_reaches_back_over_so_many_blocks_from_a_border(window, run):
    of = groups(window)
    assert of.run_length(0) == run
    for column in range(run, 9):
        assert column - of.first_needed(0, column * SIZE) == run


@pytest.mark.parametrize("window, size, span", [(1, 4, 1), (6, 4, 1), (10, 4, 8), (9, 3, 7), (17, 1, 5)])
@pytest.mark.parametrize("start", [0, 5, 12])
def test_a_window_and_a_step_hold_so_many_blocks_at_most(window, size, span, start):
    """Whatever the steps before have computed, given up with whole blocks."""
    of = groups(window, size=size)
    for stop in range(start + 1, start + 80):
        most = max(
            -(-min(stop, computed + span) // size) - of.first_needed(0, computed // size * size)
            for computed in range(start, stop)
        )
        found = of.most_columns(0, range(start, stop), span)
        assert found == most if stop <= start + span or stop > start + 40 else found >= most


def test_what_lies_behind_the_windows_is_given_up_once():
    of, blocks = groups(None, 6, 3), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert sorted(of.give_up(blocks, 12)) == [5, 9, 10]
    assert blocks == [[1, 2, 3, 4], [0, 6, 7, 8], [0, 0, 11, 12]]
    assert of.give_up(blocks, 12) == [] and sorted(of.give_up(blocks, 16)) == [6, 11]


def test_lists_of_several_lengths_are_walked_in_token_order():
    blocks = [[1, 2, 3, 4], [0, 6], [0, 0]]
    assert in_token_order(blocks) == [1, 2, 6, 3, 4] and num_held(blocks) == 5


# ------------------------------------------------------------------------------------------------------ hits


class Published:
    """A pool of which only `find` is asked: block 1 + 100 group + column, where the bitmaps have it."""

    def __init__(self, bitmaps):
        self.bitmaps = bitmaps

    def find(self, key):
        column, group = key
        return 1 + 100 * group + column if self.bitmaps[group][column] else None


def brute_force(bitmaps, windows, num_blocks):
    """The longest prefix, in blocks, behind which every group has all that the next token reads."""
    for length in range(num_blocks, -1, -1):
        first = [0 if w is None else max(0, length * SIZE - w + 1) // SIZE for w in windows]
        if all(all(bits[start:length]) for bits, start in zip(bitmaps, first, strict=True)):
            return length
    raise AssertionError("nothing is always there")


@pytest.mark.parametrize("windows", [(None, 3, 10), (6, None, 17), (9, 5), (1, None, 4)])
def test_hit_is_the_longest_that_every_group_can_go_on_from(windows):
    """All bitmaps of the full group's prefix and of the first window's blocks, a fixed set of those of the second.

    Of a full group nothing behind the first block that is missing counts, so that 13 bitmaps are all there are.
    """
    n = 12
    prefixes = [[i < length for i in range(n)] for length in range(n + 1)]
    every = list(product([False, True], repeat=n))
    choices = [prefixes if window is None else every for window in windows]
    of, request = groups(*windows), SimpleNamespace(num_tokens=n * SIZE + 1, block_hashes=list(range(n)))
    request.params = SamplingParams()
    for number, bits in enumerate(every):
        for other in range(13):
            own = iter((bits, every[(number * 2654435761 + other * 40503) % len(every)]))
            full = choices[windows.index(None)][other] if None in windows else None
            bitmaps = [full if window is None else next(own) for window in windows]
            hits = PrefixCache(Published(bitmaps), of, enabled=True).lookup(request)
            length = brute_force(bitmaps, windows, n)
            assert [len(blocks) for blocks in hits] == [length] * len(windows)
            for group, (window, blocks) in enumerate(zip(windows, hits, strict=True)):
                first = 0 if window is None else max(0, length * SIZE - window + 1) // SIZE
                assert blocks == [0] * first + [1 + 100 * group + column for column in range(first, length)]


# ------------------------------------------------------------------------------------------------- scheduling


def held(request):
    return [[block for block in blocks if block] for blocks in request.block_ids]


@pytest.mark.parametrize("in_flight, most", [(1, 3 + 2), (2, 3 + 2 + 2)])
def test_a_long_prompt_in_chunks_holds_its_window_and_the_chunks_in_flight(sim, in_flight, most):
    """Nine tokens before a border reach over three blocks, and a chunk fills two."""
    shadow = sim.Shadow(windows=(None, 10), num_blocks=200, max_num_batched_tokens=8, max_in_flight=in_flight)
    request = sim.request("a", range(200), 40)
    shadow.add(request)
    seen = 0
    while request.status is not RequestStatus.FINISHED:
        while len(shadow.in_flight) < in_flight:
            shadow.issue()
            seen = max(seen, len(held(request)[1]))
        shadow.commit()
    assert seen == most
    shadow.drain()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks, together", [(126, False), (140, True)])
def test_a_long_prompt_waits_for_the_window_of_all_its_chunks(sim, in_flight, num_blocks, together):
    """A window of 65 blocks (128 a chunk and 65 a window without a break), most of which another request holds."""
    shadow = sim.Shadow(windows=(257,), num_blocks=num_blocks, max_num_batched_tokens=32, max_in_flight=in_flight)
    first, second = sim.request("a", range(300), 60), sim.request("b", range(1000, 1600), 4, arrival=1)
    for request in (first, second):
        shadow.add(request)
    ran = False
    while second.status is not RequestStatus.FINISHED:
        while len(shadow.in_flight) < in_flight:
            shadow.issue()
        ran |= first.status is second.status is RequestStatus.RUNNING
        shadow.commit()
    assert shadow.scheduler.stats()["num_preemptions"] == 0 and ran is together
    shadow.drain()


def beside_decodes(sim, num_blocks, in_flight):
    """Seven requests of windows of 17 that draw tokens."""
    shadow = sim.Shadow(windows=(17,), num_blocks=num_blocks, max_num_seqs=9, max_in_flight=in_flight)
    for i in range(7):
        shadow.add(sim.request(f"d{i}", range(50 * i, 50 * i + 17), 200, arrival=i))
    for _ in range(8):
        shadow.step()
    return shadow


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("left, runs", [(15 + 7 - 1, False), (15 + 7, True)])
def test_a_prompt_claims_what_its_chunks_hold_at_a_time(sim, left, runs, in_flight):
    """57 tokens fill 15 blocks, and 40 more tokens want 10, when the window has left as many behind: a window and a
    whole step would be 21 blocks, all tokens 25. Each of the others keeps a block."""
    trial = beside_decodes(sim, 200, in_flight)
    trial.issue()
    shadow = beside_decodes(sim, 200 - trial.scheduler.pool.num_free + left, in_flight)
    late = sim.request("late", range(1000, 1097), 4, arrival=8)
    shadow.add(late)
    shadow.issue()
    assert late.status is (RequestStatus.RUNNING if runs else RequestStatus.WAITING)
    while runs and late.status is not RequestStatus.FINISHED:
        shadow.step()
    assert shadow.scheduler.stats()["num_preemptions"] == 0


def test_a_request_that_waits_does_not_count_on_what_running_ones_take_first(sim):
    """Their windows give up as many blocks as they take: the newcomer of a higher rank preempts at once."""
    limits = {"num_blocks": 24, "max_num_batched_tokens": 16, "max_in_flight": 2, "prefix_caching": False}
    shadow = sim.Shadow(windows=(13,), policy="priority", **limits)
    for i in range(8):
        shadow.add(sim.request(f"l{i}", range(13 + i), 300, arrival=i, priority=5))
    shadow.issue()
    for _ in range(20):
        shadow.issue()
        shadow.commit()
    high = sim.request("h", range(500, 513), 4, arrival=9, priority=0)
    shadow.add(high)
    shadow.issue()
    assert high.status is RequestStatus.RUNNING
    shadow.drain()


def test_decodes_hold_their_window_alone(sim):
    shadow = sim.Shadow(windows=(6, None), num_blocks=200, prefix_caching=False)
    requests = [sim.request(f"r{i}", range(i + 3), 90, arrival=i) for i in range(3)]
    for request in requests:
        shadow.add(request)
    for _ in range(60):
        shadow.step()
        assert all(len(held(request)[0]) <= 2 + 1 for request in requests)
    shadow.drain()


def test_a_request_that_outgrows_the_pool_runs_within_its_window(sim):
    shadow = sim.Shadow(windows=(9,), num_blocks=8, max_num_batched_tokens=8)
    shadow.add(sim.request("a", range(100), 60))
    shadow.drain()


def test_a_request_whose_window_outgrows_the_pool_is_refused(sim):
    scheduler = Scheduler({}, sim.context(windows=(9, None), num_blocks=20, max_num_batched_tokens=8))
    scheduler.check_request(sim.request("fits", range(40), 16))  # 14 blocks of all tokens, 5 of the window and a step
    with pytest.raises(RequestError, match=r"are 60 tokens and need 20 blocks, but the pool has 19"):
        scheduler.check_request(sim.request("long", range(40), 20))


def test_blocks_behind_a_window_are_found_until_somebody_takes_them(sim):
    shadow = sim.Shadow(windows=(None, 5), num_blocks=60)
    prompt = list(range(30))
    shadow.add(sim.request("a", prompt, 4))
    shadow.drain()
    again = sim.request("b", prompt[:20] + [49] * 10, 4, arrival=1)  # parts from the first long before its end
    shadow.add(again)
    shadow.drain()
    assert again.num_cached_tokens == 20


def test_a_hit_is_as_long_as_the_blocks_that_a_window_still_finds(sim):
    shadow = sim.Shadow(windows=(None, 5), num_blocks=60)
    shadow.add(sim.request("a", range(30), 4))
    shadow.drain()
    pool = shadow.scheduler.pool
    for (digest, group), block in pool.published().items():  # as if the window's blocks had been taken but for one
        if group == 1 and digest != shadow.requests["a"].block_hashes[2]:
            pool._reusable.pop(block)
            del pool._block_of[digest, group], pool._key_of[block]
            pool._states[block], pool._is_blank[block] = 0, 1
            pool._num_blank, pool._lowest = pool._num_blank + 1, 1
    again = sim.request("b", range(30), 4, arrival=1)
    shadow.add(again)
    shadow.drain()
    assert again.num_cached_tokens == 12


@pytest.mark.parametrize("windows", [(None, 5), (3,), (7, None, 2)])
def test_siblings_share_what_the_first_one_still_has(sim, windows):
    shadow = sim.Shadow(windows=windows, num_blocks=120, max_num_seqs=4, prefix_caching=False)
    siblings = [sim.request(f"s{i}", range(14), 9, arrival=i / 8) for i in range(4)]
    for request in siblings:
        request.siblings = siblings
        shadow.add(request)
    assert any(shadow.step().block_ops.copy for _ in range(20))
    assert sum(r.status is RequestStatus.RUNNING for r in siblings) == 4
    shadow.drain()


def test_a_sibling_that_comes_too_late_to_share_is_computed(sim):
    """Three rows: the last one gets one when the others are far behind the prompt, and waits for nobody's end."""
    shadow = sim.Shadow(windows=(3,), num_blocks=120, max_num_seqs=3, prefix_caching=False)
    siblings = [sim.request(f"s{i}", range(9), 30, arrival=i / 8) for i in range(4)]
    siblings[2].max_total_tokens = 16  # ends long before the others
    for request in siblings:
        request.siblings = siblings
        shadow.add(request)
    while siblings[2].status is not RequestStatus.FINISHED:
        shadow.step()
    for _ in range(3):
        shadow.step()
    assert siblings[3].status is RequestStatus.RUNNING and siblings[0].status is RequestStatus.RUNNING
    shadow.drain()


def test_swapped_requests_bring_back_their_windows_alone(sim):
    limits = {"windows": (None, 5), "num_blocks": 27, "max_num_seqs": 4, "prefix_caching": False}
    shadow = sim.Shadow(num_swap_blocks=40, **limits)
    for i in range(4):
        shadow.add(sim.request(f"r{i}", range(i, i + 10), 24, arrival=i))
    moved = [0, 0]
    while shadow.scheduler.has_work():
        step = shadow.step()
        for place, pairs in enumerate((step.block_ops.swap_out, step.block_ops.swap_in)):
            moved[place] += len(pairs)
    shadow.drain()
    counts = shadow.scheduler.stats()
    assert counts["num_swap_outs"] and moved[0] and moved[0] == moved[1]


def test_connector_beside_a_window_never_comes_here(sim):
    """The engine refuses the two by name."""

    class Wire(NoConnector):
        pass

    with pytest.raises(AssertionError, match=r"Wire object .* beside windows \[5\]"):
        Scheduler({}, sim.context(windows=(None, 5), connector=Wire()))
