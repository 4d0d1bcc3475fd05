"""The plugin on small steps, in Triton's interpreter where no CUDA device is visible and compiled with `-m cuda`."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ...interpreted import HAS_TRITON, kernel_device, quiet_interpreter  # noqa: F401  (fixtures; before triton)

from framework.interfaces import AttentionContext  # isort: skip
from framework.testing.attention import build, reference  # isort: skip

from .placing import on_device  # isort: skip

if HAS_TRITON:
    from framework_attention.triton import attention as triton_attention
else:
    collect_ignore_glob = ["test_*.py"]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""float32: sums over up to 1500 keys; the others round weights and the result to 8 or 11 bits."""


class Step:
    """A case's inputs on a device, and the plugin with its KV memory filled with NaN but for the case's past."""

    def __init__(self, built, device, block_size=16, *, is_invariant=False, **decode):
        case, dtype = built.case, built.q.dtype
        self.built, self.device = built, device
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": max(4096, *case.seq_lens)}
        backend = SimpleNamespace(name="tests", device=device)
        ctx = AttentionContext(backend, block_size, dtype, batch_invariant=is_invariant, **limits)
        self.attention = triton_attention.TritonAttention({}, ctx)
        spec = case.layer(None if built.sinks is None else built.sinks.to(device))
        shape = self.attention.kv_spec(spec).shape
        kv = torch.full([built.num_blocks if size == -1 else size for size in shape], float("nan"), dtype=dtype)
        by_slot = kv.transpose(2, 3).transpose(1, 2)  # [blocks, block_size, 2, Hk, D]
        for (k, v), where in zip(built.past, built.past_slots, strict=True):
            by_slot[where // block_size, where % block_size] = torch.stack((k, v), 1)
        self.kv = kv.to(device)
        shape = replace(triton_attention.decode_shape(dtype, case.head_dim, 1, 1 << 20), **decode)
        with mock.patch.object(triton_attention, "decode_shape", lambda *_: shape):
            self.attention.bind([spec], [self.kv])

    def batch(self):
        return on_device(self.built.batch, self.device)

    def plan(self):
        return self.attention.plan(self.batch(), 0)

    def forward(self):
        q, k, v = (t.to(self.device) for t in (self.built.q, self.built.k, self.built.v))
        return self.plan().forward(0, q, k, v).cpu()

    def at_slots(self):
        """Keys and values of the step's slots, [2, T, Hk, D]."""
        where, size = self.built.batch.slot_mapping[0], self.kv.shape[3]
        return self.kv.cpu()[where // size, :, :, where % size].transpose(0, 1)

    def assert_close(self, out):
        """out [T, Hq, D] of the step, against the float64 reference."""
        tolerance = TOLERANCE[self.built.q.dtype]
        expected = reference(self.built, self.built.case.head_dim**-0.5)
        assert out.dtype == self.built.q.dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def step(device):
    """step(case, dtype, block_size=16, is_invariant=False, **fields of DecodeShape)."""

    def make(case, dtype=torch.float32, block_size=16, **words):
        return Step(build(case, block_size, dtype), device, block_size, **words)

    return make


@pytest.fixture
def step_of(device):
    """step_of(built, is_invariant=False): of inputs that were built already."""
    return lambda built, **words: Step(built, device, **words)
