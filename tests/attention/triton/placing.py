"""Cases and plugins of attention on a device, or in the interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from framework.testing.attention_suite import AttentionPlugin

_TENSORS = ("query_start_loc", "seq_lens", "idx_mapping", "positions")


def on_device(batch, device):
    """The batch of a case with its tensors there."""
    moved = {name: getattr(batch, name).to(device) for name in _TENSORS}
    slots, tables = (tuple(t.to(device) for t in group) for group in (batch.slot_mapping, batch.block_table))
    return replace(batch, **moved, slot_mapping=slots, block_table=tables)


def plugin_on(target, device):
    """A plugin for the contract suite, on a backend that allocates there and records steps where they can be."""

    def allocate_kv(specs, num_blocks):
        shapes = [[num_blocks if size == -1 else size for size in spec.shape] for spec in specs]
        return [torch.zeros(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)]

    def compile_(step, bucket):
        step()
        if device.type == "cpu":
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return lambda: (graph.replay(), out)[1]

    backend = SimpleNamespace(name="tests", device=device, allocate_kv=allocate_kv, compile=compile_)
    return AttentionPlugin(target, lambda dtype: backend)
