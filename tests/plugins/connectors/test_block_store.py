"""The block store: bytes come back equal, the least recently used go first, one store a name."""

import threading

import pytest
import torch

from framework.errors import ConfigError
from framework_connectors.block_store import BlockStore, drop_store, store_named


def block(value, size=4):
    return [torch.full((size,), float(value)), torch.full((2, size), float(value))]  # 12 * size bytes


def test_block_comes_back_as_it_was():
    store = BlockStore(1000)
    assert store.put("a", block(1)) and store.get("b") is None
    assert all(torch.equal(x, y) for x, y in zip(store.get("a"), block(1), strict=True))
    assert "a" in store and "b" not in store and store.num_bytes == 48


@pytest.mark.parametrize("use", ["get", "touch", "put"])
def test_least_recently_used_block_goes_first(use):
    store = BlockStore(100)
    store.put("a", block(1))
    store.put("b", block(2))
    {"get": lambda: store.get("a"), "touch": lambda: store.touch(["a"]), "put": lambda: store.put("a", block(1))}[use]()
    store.put("c", block(3))
    assert ("a" in store, "b" in store, "c" in store) == (True, False, True) and store.num_bytes == 96


def test_block_larger_than_the_store_is_not_kept_and_displaces_nothing():
    store = BlockStore(100)
    store.put("a", block(1))
    assert not store.put("b", block(2, size=100))
    assert "a" in store and len(store) == 1


def test_block_that_is_there_stays():
    store = BlockStore(100)
    store.put("a", block(1))
    store.put("a", block(2))
    assert store.get("a")[0][0] == 1 and store.num_bytes == 48


def test_bytes_are_counted_right_from_many_threads():
    store = BlockStore(480)

    def work(start):
        for i in range(200):
            store.put((start + i) % 37, block(i))
            store.get(i % 37)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_bytes == 48 * len(store) == 480


def test_stores_are_shared_by_name_and_keep_their_size():
    drop_store("named")
    store = store_named("named", 100)
    assert store_named("named", 100) is store and store_named("other", 100) is not store
    with pytest.raises(ConfigError, match="the store 'named' of this process holds 100"):
        store_named("named", 200)
    drop_store("named")
    assert store_named("named", 200) is not store
    drop_store("named")
    drop_store("other")
