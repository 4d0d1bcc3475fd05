"""Small steps of latent attention for the plugin `mla_triton`, with NaN wherever no token was written."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from framework.interfaces import AttentionContext, LatentUp
from framework.testing.attention import reference

from .placing import on_device

# float32: sums over up to 1500 keys. The others round absorbed queries, weights and parts to 8 or 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class LatentStep:
    """A case's inputs on a device, and the plugin with its KV memory."""

    def __init__(self, built, device, block_size, *, is_invariant=False, **shape):
        from framework_attention.triton.latent import LatentTriton

        self.built, self.device = built, device
        case, dtype = built.case, built.q.dtype
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": max(4096, *case.seq_lens)}
        backend = SimpleNamespace(name="tests", device=device)
        self.attention = LatentTriton(
            {}, AttentionContext(backend, block_size, dtype, batch_invariant=is_invariant, **limits)
        )
        layer = case.layer(None)
        sizes = [built.num_blocks if size == -1 else size for size in self.attention.kv_spec(layer).shape]
        kv = torch.full(sizes, float("nan"), dtype=dtype)
        for (latents, _), where in zip(built.past, built.past_slots, strict=True):
            kv.flatten(0, 1)[where] = latents[:, 0]
        self.kv = kv.to(device)
        self.attention.bind([layer], [self.kv])
        self.attention.shape = replace(self.attention.shape, **shape)
        self.up = LatentUp(built.up.keys.to(device), built.up.values.to(device))

    def batch(self):
        return on_device(self.built.batch, self.device)

    def plan(self):
        return self.attention.plan(self.batch(), 0)

    def forward(self):
        q, latent = (t.to(self.device) for t in (self.built.q, self.built.k[:, 0]))
        return self.plan().forward_latent(0, q, latent, self.up).cpu()

    def at_slots(self):
        """Latents of the step's slots, [T, R + d_rope]."""
        return self.kv.cpu().flatten(0, 1)[self.built.batch.slot_mapping[0]]

    def assert_close(self, out):
        """out [T, H, d_value] of the step, against the float64 reference in which every key is expanded."""
        tolerance = TOLERANCE[self.built.q.dtype]
        assert out.dtype == self.built.q.dtype
        torch.testing.assert_close(
            out.double(), reference(self.built, self.built.case.scale), atol=tolerance, rtol=tolerance
        )
