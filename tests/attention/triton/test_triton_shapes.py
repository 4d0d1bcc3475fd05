"""Which tiles attention takes on which device, by arithmetic alone, and the memory that a program of them takes."""

import subprocess
import sys

import pytest
import torch

from framework.errors import ConfigError
from framework_attention.triton.latent_shapes import (
    ExpandedShape,
    LatentShape,
    ProductShape,
    absorb_shape,
    expand_shape,
    latent_shape,
)
from framework_attention.triton.latent_shapes import prompt_shape as latent_prompt_shape
from framework_attention.triton.shapes import DecodeShape, PromptShape, decode_shape, invariant_shape, prompt_shape

from ...backends.triton.hopper import absent

A100, ADA, H200 = 166912, 101376, 232448
"""Bytes that a program may have; Ada's are those of compute capability 8.6, 8.9 and 12.0."""
BF16, F32 = torch.bfloat16, torch.float32


# ---------------------------------------------------------------------------------------- what was measured on an H200


def test_an_h200_keeps_its_tiles_of_heads():
    for dim_pad, warps in ((64, 2), (128, 2), (256, 4)):
        assert decode_shape(BF16, dim_pad, 4, H200) == DecodeShape(32, warps, 3)
    assert [decode_shape(F32, dim_pad, 4, H200) for dim_pad in (128, 256)] == [
        DecodeShape(32, 8, 3), DecodeShape(16, 4, 3)
    ]  # fmt: skip
    assert prompt_shape(BF16, 128, 4, H200) == prompt_shape(BF16, 64, 8, H200) == PromptShape(128, 64, 8, 3)
    assert prompt_shape(BF16, 128, 4, H200, num_keys=4096) == PromptShape(128, 128, 8, 3)
    assert prompt_shape(BF16, 256, 2, H200) == PromptShape(64, 32, 4, 3)
    assert [prompt_shape(F32, dim_pad, 4, H200) for dim_pad in (128, 256)] == [
        PromptShape(64, 32, 8, 2), PromptShape(16, 16, 4, 2)
    ]  # fmt: skip
    assert invariant_shape(BF16, 128, 4, H200) == PromptShape(64, 64, 4, 3)


def test_an_h200_keeps_its_tiles_of_latents():
    assert [latent_shape(BF16, heads, 512, 64, H200) for heads in (16, 32, 64, 128)] == [
        LatentShape(16, 32, 4, 3), LatentShape(32, 32, 8, 3), LatentShape(64, 32, 8, 2), LatentShape(64, 32, 8, 2)
    ]  # fmt: skip
    assert latent_shape(F32, 128, 512, 64, H200) == LatentShape(16, 16, 8, 1)
    assert latent_prompt_shape(BF16, H200) == ExpandedShape(128, 64, 8, 3)
    for dtype in (BF16, F32):
        absorbed = [absorb_shape(dtype, 128, count, H200, is_invariant=False) for count in (1, 64, 65)]
        assert absorbed == [ProductShape(16, 64), ProductShape(16, 64), ProductShape(64, 128)]
        expanded = [expand_shape(dtype, 512, count, H200, is_invariant=False) for count in (4, 16, 32, 128, 129)]
        many = ProductShape(32, 128, num_warps=8) if dtype is BF16 else ProductShape(16, 64)
        assert expanded == [
            ProductShape(1, 32, 16), ProductShape(2, 64, 8), ProductShape(4, 64, 4), ProductShape(16, 64), many
        ]  # fmt: skip
        assert absorb_shape(dtype, 128, 1, H200, is_invariant=True) == ProductShape(64, 128)
        assert expand_shape(dtype, 512, 129, H200, is_invariant=True) == ProductShape(16, 64)


# ------------------------------------------------------------------------------------------- devices of less memory


@pytest.mark.parametrize("heads", [64, 128])
def test_many_heads_of_latents_take_tiles_that_a_device_of_less_memory_holds(heads):
    assert latent_shape(BF16, heads, 512, 64, A100) == LatentShape(64, 32, 8, 2)
    assert latent_shape(BF16, heads, 512, 64, ADA) == LatentShape(32, 32, 8, 2)


def test_few_heads_of_latents_take_the_same_tiles_on_every_device():
    assert latent_shape(BF16, 16, 512, 64, ADA) == LatentShape(16, 32, 4, 3)


def test_products_around_latents_take_fewer_columns_where_memory_is_short():
    assert expand_shape(BF16, 512, 129, A100, is_invariant=False) == ProductShape(16, 64)
    assert [expand_shape(F32, 512, count, A100, is_invariant=False).columns for count in (1, 64)] == [32, 32]
    assert [expand_shape(F32, 512, count, ADA, is_invariant=False).columns for count in (1, 64)] == [16, 16]
    assert absorb_shape(F32, 256, 65, ADA, is_invariant=False) == ProductShape(64, 32)


def test_wide_heads_take_tiles_that_a_device_holds():
    assert decode_shape(BF16, 512, 8, H200) == DecodeShape(32, 4, 3)
    assert decode_shape(BF16, 512, 8, ADA) == DecodeShape(32, 4, 2)
    assert decode_shape(F32, 128, 64, ADA) == DecodeShape(32, 8, 2)  # 64 heads to a KV head
    assert prompt_shape(BF16, 512, 8, H200) == PromptShape(64, 32, 4, 2)
    assert prompt_shape(BF16, 512, 8, ADA) == PromptShape(16, 16, 4, 2)


def test_what_no_tile_of_a_device_holds_is_told_by_its_size():
    with pytest.raises(
        ConfigError, match=r"attention=triton: a head of 2048 values needs [\d,]+ bytes .* has 101,376\."
    ):
        decode_shape(F32, 2048, 1, ADA)
    with pytest.raises(ConfigError, match=r"attention=triton: a head of 1024 values needs .* Use another device"):
        prompt_shape(F32, 1024, 1, ADA)
    with pytest.raises(ConfigError, match=r"attention=mla_triton: a key of 1024 \+ 64 values needs 155,648 bytes"):
        latent_shape(F32, 16, 1024, 64, ADA)
    with pytest.raises(ConfigError, match=r"attention=mla_triton: a latent of 1024 values needs"):
        expand_shape(F32, 1024, 1, ADA, is_invariant=False)
    with pytest.raises(
        ConfigError, match=r"attention=mla_triton: a query of 2048 values before its rotated ones needs"
    ):
        absorb_shape(F32, 2048, 1, ADA, is_invariant=False)


# ----------------------------------------------------------------------------------- compiled for devices not there

COMPILE = """
from types import SimpleNamespace

from triton.backends.nvidia.compiler import CUDABackend

CUDABackend.make_ptx = lambda self, src, metadata, *words: metadata.update(name="kernel") or "ptx"
CUDABackend.make_cubin = lambda *words: b""  # neither is needed to know the memory
taken = {}


def compiled(self, *args, grid, warmup, **words):
    kernel = run(self, *args, grid=grid, warmup=True, **words)
    assert kernel.metadata.shared <= SHARED, f"{self.__name__}{words}: {kernel.metadata.shared} bytes"
    taken[self.__name__] = max(kernel.metadata.shared, taken.get(self.__name__, 0))
    return kernel


JITFunction.run = compiled

from framework.interfaces import AttentionContext
from framework.testing.attention import DEEPSEEK, AttentionCase, build
from framework_attention.triton import attention, latent

torch.cuda.get_device_capability = lambda device: divmod(CAPABILITY, 10)
for module in (attention, latent):
    module._shared_bytes, module._num_multiprocessors = lambda device: SHARED, lambda device: 132


def bound(kind, case, dtype):
    built, layer = build(case, 32, dtype), case.layer(None)
    backend = SimpleNamespace(name="tests", device=SimpleNamespace(type="cuda"))
    plugin = kind({}, AttentionContext(backend, 32, dtype, 256, 1024, 4096, False))
    shape = [built.num_blocks if size == -1 else size for size in plugin.kv_spec(layer).shape]
    plugin.bind([layer], [torch.zeros(shape, dtype=dtype)])
    return built, plugin.plan(built.batch, 0)


def latents(num_heads, dtype, num_rows, *prompts):
    lens = (3,) * (num_rows + len(prompts)), (1,) * num_rows + prompts
    built, plan = bound(latent.LatentTriton, AttentionCase("c", *lens, num_heads=num_heads, latent=DEEPSEEK), dtype)
    plan.forward_latent(0, built.q, built.k[:, 0], built.up)


def heads(num_heads, head_dim, dtype):
    sizes = {"num_heads": num_heads, "num_kv_heads": 2, "head_dim": head_dim}
    built, plan = bound(attention.TritonAttention, AttentionCase("c", (400, 0), (1, 30), **sizes), dtype)
    plan.forward_projections(0, torch.cat((built.q, built.k, built.v), dim=1), None, None)


for num_heads in (16, 32, 128):
    latents(num_heads, torch.bfloat16, 1, 70)
for num_rows in (8, 20, 130):
    latents(16, torch.bfloat16, num_rows)
latents(16, torch.float32, 1, 70)
latents(16, torch.float32, 33)
for num_heads, head_dim in ((8, 128), (8, 256), (16, 512)):
    heads(num_heads, head_dim, torch.bfloat16)
print(*sorted(name for name, most in taken.items() if most > 16384))
"""


@pytest.mark.full
@pytest.mark.parametrize(("capability", "shared"), [(89, ADA), (90, H200), (120, ADA)])
def test_programs_of_attention_take_no_more_memory_than_a_device_has(tmp_path, capability, shared):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = absent(capability) + COMPILE.replace("CAPABILITY", str(capability)).replace("SHARED", str(shared))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    kernels = "absorb_kernel decode_kernel expand_kernel latent_decode_kernel latent_prompt_kernel prompt_kernel"
    assert done.stdout.strip() == kernels, done.stderr[-3000:]
