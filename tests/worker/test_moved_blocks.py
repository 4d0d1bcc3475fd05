"""Blocks that the worker moves: out to host memory and back, and around the layers of a step."""

from types import SimpleNamespace

import torch

from framework.batch import BlockOps
from framework.interfaces import KVSpec
from framework.nulls import NoConnector
from framework.testing.connector_engine import SHAPES, HostMemory
from framework.worker.host_blocks import HostBlocks
from framework.worker.layerwise import LayerwisePlan
from framework.worker.model_runner import ModelRunner


def memory(num_blocks=6):
    """Random KV of two layers of different layouts."""
    generator = torch.Generator().manual_seed(3)
    shapes = [[num_blocks if n == -1 else n for n in shape] for shape in SHAPES]
    return [torch.randn(shape, generator=generator) for shape in shapes], [
        KVSpec(shape, torch.float32, 0) for shape in SHAPES
    ]


def test_blocks_come_back_from_host_memory_bit_for_bit():
    kv, specs = memory()
    host = HostBlocks(HostMemory(), kv, specs, num_blocks=4)
    before = HostMemory().gather_blocks(kv, specs, [1, 4, 5])
    host.swap_out([(1, 3), (4, 0)])
    host.swap_out([(5, 2)])
    for tensor in kv:
        tensor.fill_(7)
    host.swap_in([(0, 2), (3, 1), (2, 3)])
    after = HostMemory().gather_blocks(kv, specs, [1, 2, 3])
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert all((t == 7).all() for t in HostMemory().gather_blocks(kv, specs, [0, 4, 5]))


def test_host_block_is_written_over():
    kv, specs = memory()
    host = HostBlocks(HostMemory(), kv, specs, num_blocks=1)
    host.swap_out([(1, 0)])
    host.swap_out([(2, 0)])
    host.swap_in([(0, 3)])
    second, third = HostMemory().gather_blocks(kv, specs, [2, 3])[0]
    assert torch.equal(second, third)


def test_layerwise_connector_stands_around_each_layer():
    calls = []

    class Plan:
        def forward(self, layer, q, k, v):
            calls.append(("attend", layer))
            return q

    class Layerwise(NoConnector):
        def wait_layer(self, layer):
            calls.append(("wait", layer))

        def save_layer(self, layer):
            calls.append(("save", layer))

    plan, q = LayerwisePlan(Plan(), Layerwise()), torch.zeros(1)
    assert plan.forward(2, q, q, q) is q
    assert calls == [("wait", 2), ("attend", 2), ("save", 2)]


def test_step_moves_blocks_out_before_it_copies_and_copies_before_it_moves_blocks_in():
    kv, specs = memory()
    host = HostBlocks(HostMemory(), kv, specs, num_blocks=2)
    runner = ModelRunner.__new__(ModelRunner)
    runner.backend, runner.kv, runner.kv_specs, runner._host_blocks = Copying(), kv, specs, host
    host.swap_out([(5, 1)])
    before = HostMemory().gather_blocks(kv, specs, [1, 2, 5])
    runner._move_blocks(SimpleNamespace(block_ops=BlockOps(swap_out=[(1, 0)], copy=[(2, 1)], swap_in=[(1, 2)])))
    host.swap_in([(0, 4)])
    after = HostMemory().gather_blocks(kv, specs, [4, 1, 2])
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


class Copying(HostMemory):
    def copy_blocks(self, kv, specs, pairs):
        sources, targets = zip(*pairs, strict=True)
        self.scatter_blocks(kv, specs, targets, self.gather_blocks(kv, specs, sources))
