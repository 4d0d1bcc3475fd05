"""Models over the operations of the CUDA backend against the same models over their torch references.

What a product takes into its launch, and what it leaves to be composed, differs between families.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from framework.interfaces import ForwardContext, ModelContext
from framework.layers import ops
from framework_backends.cuda_layer_ops import CudaLayerOps
from framework_backends.cuda_linear import CudaLinearPacker
from framework_loaders.dummy import DummySource
from framework_models.gemma2 import Gemma2
from framework_models.gemma3 import Gemma3
from framework_models.gpt2 import Gpt2
from framework_models.olmo2 import Olmo2
from framework_models.phi3 import Phi3

from ...models.conftest import FullAttention

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
CASES = {
    "phi3": (Phi3, SIZES | {"partial_rotary_factor": 0.5, "sliding_window": 2}),
    "olmo2": (Olmo2, SIZES),
    "gemma2": (Gemma2, SIZES | CAPS | {"head_dim": 16, "sliding_window": 2}),
    "gemma3": (Gemma3, SIZES | {"head_dim": 16, "sliding_window": 2, "sliding_window_pattern": 2}),
    "gpt2": (Gpt2, {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
}

BY_DEFAULT = {"gemma2", "gpt2"}  # the interpreter takes seconds for one


class InDtype(FullAttention):
    """Attention whose output has the dtype of what comes in."""

    def forward(self, layer, q, k, v):
        return super().forward(layer, q, k, v).to(q.dtype)


class Random(DummySource):
    """The dummy's weights, large enough for every part to count, with norms and biases that do something."""

    def take(self, name, shape, dtype=None):
        generator = torch.Generator(self.device).manual_seed(sum(name.encode()))
        noise = torch.randn(tuple(shape), generator=generator, device=self.device) * 0.2
        is_norm = "norm" in name or ".ln_" in name
        return (noise + 1 if is_norm and name.endswith("weight") else noise).to(dtype or self.dtype)


def reference(device, dtype):
    pack = lambda weight, bias=None: lambda x: functional.linear(x, weight, bias)  # noqa: E731
    return SimpleNamespace(device=device, dtype=dtype, layer_ops=ops, pack_linear=pack)


def fast(device, dtype, batch_invariant):
    pack = CudaLinearPacker(batch_invariant).pack
    return SimpleNamespace(
        device=device, dtype=dtype, layer_ops=CudaLayerOps(), pack_linear=lambda weight, bias=None: pack(weight, bias)
    )


def logits(backend, name, ids):
    target, config = CASES[name]
    ctx = ModelContext(backend, Random(backend.dtype, backend.device, 0), backend.dtype, backend.device, 64)
    model = target(config, ctx)
    plans = [InDtype(ctx.layers)] * len(ctx.layers)
    ids = torch.tensor(ids, device=backend.device)
    positions = torch.arange(len(ids), device=backend.device)
    return model.compute_logits(model.forward(model.embed(ids), positions, ForwardContext(plans)).hidden)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full) for name in CASES]
)
def test_logits_equal_those_of_the_torch_references(device, name, batch_invariant):
    dtype = torch.float16  # the interpreter cuts bfloat16 off
    for ids in ([7], [3, 39, 9]):  # one row goes through another kernel than several
        expected = logits(reference(device, dtype), name, ids).float()
        found = logits(fast(device, dtype, batch_invariant), name, ids).float()
        # eleven bits, a rounding for each operation of two layers
        assert (found - expected).abs().max() < 2e-2 * expected.abs().max()
        assert expected.abs().max() > 0.5
