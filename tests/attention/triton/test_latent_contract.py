"""The contract suite of attention plugins on `mla_triton`: all on a device, a few rows in the interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from framework.testing import attention_suite
from framework.testing.attention import LATENT_CASES
from framework.testing.attention_suite import AttentionPlugin, check_attention

FEW = ("decodes_and_chunks_mixed", "padding_rows_and_tokens", "two_tokens_over_a_block_border")


@pytest.fixture
def plugin(device):
    from framework_attention.triton.latent import LatentTriton

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
    return AttentionPlugin(LatentTriton, lambda dtype: backend)


def test_contract_suite_passes(plugin, device, monkeypatch):
    if device.type == "cpu":
        caps = replace(plugin.caps, block_sizes=(32, 16), any_block_size=False, dtypes=("float32",))
        monkeypatch.setattr(plugin.target, "caps", caps)
        few = [replace(case, num_heads=1) for case in LATENT_CASES if case.name in FEW]
        monkeypatch.setattr(attention_suite, "LATENT_CASES", few)
        monkeypatch.setattr(attention_suite, "PROMPT", 18)
        monkeypatch.setattr(attention_suite, "CHUNKS", (7,))
        monkeypatch.setattr(attention_suite, "RECORDED", ((20, 3, 17), (9, 30, 0)))
        monkeypatch.setattr(attention_suite, "MIXED", ("two_tokens_over_a_block_border",))
    check_attention(plugin)
