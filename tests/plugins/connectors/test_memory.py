"""`kv_connector=memory`, beside what the contract suite says of every connector: steps that overlap, or fail."""

import pytest
import torch

from framework.interfaces import KVSpec
from framework.testing.connector import CONTEXT, PROMPT
from framework.testing.connector_engine import SHAPES, HostMemory, make_request
from framework_connectors.block_store import drop_store, store_named
from framework_connectors.memory import MemoryConnector
from framework_connectors.options import MemoryOptions

CAPACITY = 1 << 20


@pytest.fixture()
def store():
    yield store_named("memory-test", CAPACITY)
    drop_store("memory-test")


def connector(**options):
    memory = MemoryConnector(MemoryOptions("memory-test", CAPACITY, **options), CONTEXT)
    kv = [torch.zeros([9 if n == -1 else n for n in shape]) for shape in SHAPES]
    memory.bind(HostMemory(), kv, [KVSpec(shape, torch.float32, 0) for shape in SHAPES])
    return memory


def stay(memory, lease, prompt, num_external_tokens=0):
    request = make_request(str(lease), prompt)
    memory.matched_tokens(request, 0)
    request.lease, request.block_ids, request.num_computed_tokens = lease, [[1, 2, 3, 4, 5]], num_external_tokens
    memory.after_alloc(request, request.block_ids, num_external_tokens)
    return request


def test_blocks_of_a_step_are_stored_though_a_later_step_has_begun(store):
    memory, metas = connector(), []
    for lease in range(2):
        request = stay(memory, lease, [lease, *PROMPT])
        request.num_published_blocks = 2
        assert memory.request_finished(request, request.block_ids), "kept until its blocks are stored"
        metas.append(memory.build_meta(None))
        memory.start_load(metas[-1])
    for lease, meta in enumerate(metas):
        memory.wait_saves(meta)
        assert memory.finished() == ([lease], []) and len(store) == 2 * lease + 2


@pytest.mark.parametrize("async_loads", [False, True])
def test_load_within_a_lost_step_is_reported_by_nobody(store, async_loads):
    memory = connector(async_loads=async_loads)
    stay(memory, 0, PROMPT, num_external_tokens=8)
    memory.step_lost(memory.build_meta(None))
    assert memory.finished() == ([], [0] if async_loads else [])
    assert memory.failed_blocks() == ([1, 2] if async_loads else [])
