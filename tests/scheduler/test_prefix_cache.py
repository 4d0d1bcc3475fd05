"""What a block's key holds, and which hits a request gets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from framework.request import SamplingParams
from framework.scheduler import BlockState, extend_hashes


def first_key(request, block_size=4):
    extend_hashes(request, 1, block_size)
    return request.block_hashes[0]


def run_alone(shadow, request):
    shadow.add(request)
    shadow.drain()
    return request


KEYS = {
    "none": {},
    "lora": {"lora": "X"},
    "salt": {"cache_salt": "X"},
    "image a": {"mm_features": [("a", 0, 4)]},
    "image b": {"mm_features": [("b", 0, 4)]},
}


def test_key_holds_everything_that_changes_kv(sim):
    keys = {name: first_key(sim.request("r", range(8), **fields)) for name, fields in KEYS.items()}
    assert len(set(keys.values())) == 5
    assert keys == {name: first_key(sim.request("s", range(8), **fields)) for name, fields in KEYS.items()}
    assert all(len(key) == 16 for key in keys.values())


@pytest.mark.parametrize("first", KEYS)
@pytest.mark.parametrize("second", KEYS)
def test_only_equal_salts_adapters_and_images_share_blocks(sim, first, second):
    shadow = sim.Shadow()
    run_alone(shadow, sim.request("r", range(9), 1, **KEYS[first]))
    shadow.memory.clear()  # the shadow's values know no images; only the hit's length is checked here
    shadow.scheduler.add_request(sim.request("s", range(9), 1, arrival=1, **KEYS[second]))
    (new,) = shadow.scheduler.schedule().new
    assert new.num_computed_tokens == (8 if first == second else 0)


def test_image_changes_only_blocks_from_its_place_on(sim):
    requests = [sim.request("r", range(12), mm_features=[(name, 5, 2)]) for name in "ab"]
    for request in requests:
        extend_hashes(request, 3, 4)
    a, b = (request.block_hashes for request in requests)
    assert a[0] == b[0] and a[1] != b[1] and a[2] != b[2]


def test_key_chains_over_the_parent(sim):
    a, b = sim.request("a", [1, 1, 1, 1, 5, 5, 5, 5]), sim.request("b", [2, 2, 2, 2, 5, 5, 5, 5])
    extend_hashes(a, 2, 4)
    extend_hashes(b, 2, 4)
    assert a.block_hashes[1] != b.block_hashes[1]


def test_keys_are_the_same_in_pieces_and_at_once(sim):
    a, b = sim.request("a", range(40)), sim.request("b", range(40))
    extend_hashes(a, 10, 4)
    for count in (1, 2, 7, 10):
        extend_hashes(b, count, 4)
    assert a.block_hashes == b.block_hashes and len(set(a.block_hashes)) == 10


def test_key_is_known_answer(sim):
    """Keys may be shared between processes and machines: they must not depend on either."""
    assert first_key(sim.request("r", range(4), lora="L", cache_salt="S")).hex() == "4fb2649b1440f4b78ec18a46b0b99878"


def test_full_hit_gives_up_its_last_block(sim):
    shadow = sim.Shadow(block_size=16)
    run_alone(shadow, sim.request("r", range(64), 2))
    assert run_alone(shadow, sim.request("s", range(64), 2, arrival=1)).num_cached_tokens == 48
    assert run_alone(shadow, sim.request("t", range(65), 2, arrival=2)).num_cached_tokens == 64


def test_outputs_are_hit_by_a_prompt_that_continues_them(sim):
    shadow = sim.Shadow()
    first = run_alone(shadow, sim.request("r", range(6), 8))
    second = run_alone(shadow, sim.request("s", [*first.token_ids, 1], 2, arrival=1))
    assert second.num_cached_tokens == 12  # the last token, index 13, was never computed


def test_hit_ends_at_the_first_block_that_is_gone(sim):
    shadow = sim.Shadow(num_blocks=6)
    run_alone(shadow, sim.request("r", range(16), 4))  # 5 blocks, 4 of them published: 0 .. 15
    run_alone(shadow, sim.request("s", range(20, 27), 1, arrival=1))  # takes the blank one and the tail of r
    assert run_alone(shadow, sim.request("t", range(16), 4, arrival=2)).num_cached_tokens == 12


def test_request_for_prompt_logprobs_takes_no_hit(sim):
    shadow = sim.Shadow()
    run_alone(shadow, sim.request("r", range(12)))
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    assert run_alone(shadow, sim.request("s", range(12), params=params, arrival=1)).num_cached_tokens == 0
    assert shadow.scheduler.stats()["prefix_recomputed_tokens"] == 8
    assert run_alone(shadow, sim.request("t", range(12), arrival=2)).num_cached_tokens == 8
    assert shadow.scheduler.stats()["prefix_recomputed_tokens"] == 8


def test_switched_off_cache_neither_hits_nor_hashes(sim):
    shadow = sim.Shadow(prefix_caching=False)
    first, second = (run_alone(shadow, sim.request(n, range(12), arrival=i)) for i, n in enumerate("rs"))
    assert second.num_cached_tokens == 0 and first.block_hashes == [] and shadow.scheduler.pool.published() == {}


def test_requests_of_one_step_do_not_share_what_neither_has_computed(sim):
    shadow = sim.Shadow()
    shadow.add(sim.request("r", range(12)))
    shadow.add(sim.request("s", range(12), arrival=1))
    new = shadow.issue().new
    assert [n.num_computed_tokens for n in new] == [0, 0]
    shadow.drain()


def test_block_is_published_only_when_its_step_came_back(sim):
    shadow = sim.Shadow(max_in_flight=2)
    shadow.add(sim.request("r", range(12)))
    shadow.issue()
    assert shadow.scheduler.pool.published() == {}
    shadow.add(sim.request("s", range(12), arrival=1))
    assert shadow.issue().new[0].num_computed_tokens == 0
    shadow.commit()
    assert len(shadow.scheduler.pool.published()) == 3
    shadow.drain()


def test_blocks_are_hashed_once(sim):
    shadow = sim.Shadow()
    request = run_alone(shadow, sim.request("r", range(10), 11))
    assert len(request.block_hashes) == len(set(request.block_hashes)) == 5


def test_partial_last_block_is_never_published(sim):
    shadow = sim.Shadow()
    run_alone(shadow, sim.request("r", range(7), 1))
    assert len(shadow.scheduler.pool.published()) == 1
    run_alone(shadow, sim.request("s", range(20, 28), 1, arrival=1))
    assert len(shadow.scheduler.pool.published()) == 3


def test_every_group_needs_the_block_for_a_hit(sim):
    shadow = sim.Shadow(num_groups=2)
    run_alone(shadow, sim.request("r", range(12)))
    pool = shadow.scheduler.pool
    assert sorted(group for _, group in pool.published()) == [0, 0, 0, 1, 1, 1]
    assert run_alone(shadow, sim.request("s", range(12), arrival=1)).num_cached_tokens == 8


def test_tail_is_evicted_in_every_group_before_the_head_of_any(sim):
    shadow = sim.Shadow(num_groups=2, num_blocks=9)
    first = run_alone(shadow, sim.request("r", range(15), 1))
    pool = shadow.scheduler.pool
    pool.allocate(4)  # two blank ones, then the tail of both groups
    left = {(key, group) for key, group in pool.published()}
    assert left == {(first.block_hashes[i], group) for i in (0, 1) for group in (0, 1)}


def test_evicted_head_makes_the_rest_unreachable(sim):
    shadow = sim.Shadow()
    first = run_alone(shadow, sim.request("r", range(13), 1))
    pool = shadow.scheduler.pool
    head = pool.find((first.block_hashes[0], 0))
    rest = [pool.find((key, 0)) for key in first.block_hashes[1:3]]
    pool.acquire(rest)
    taken = pool.allocate(pool.num_free)  # everything but the held rest, the head included
    assert head in taken and pool.state(rest[0]) is BlockState.PUBLISHED
    pool.free(taken)
    pool.free(rest)
    second = run_alone(shadow, sim.request("s", range(13), 1, arrival=1))
    assert second.num_cached_tokens == 0


def test_recycled_block_is_found_by_its_new_content_only(sim):
    shadow = sim.Shadow(num_blocks=4)
    first = run_alone(shadow, sim.request("r", range(11), 1))
    second = run_alone(shadow, sim.request("s", range(20, 31), 1, arrival=1))
    pool = shadow.scheduler.pool
    assert all(pool.find((key, 0)) is None for key in first.block_hashes[1:2])
    assert pool.find((second.block_hashes[0], 0)) is not None
    assert all(a != b for a, b in pairwise(pool.published().values()))
