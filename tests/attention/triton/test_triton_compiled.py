"""What the interpreter cannot show: that kernels with soft caps and sinks compile for a device."""

import subprocess
import sys

import pytest

from ...backends.triton.hopper import HOPPER

COMPILE = (
    HOPPER
    + """
from types import SimpleNamespace

from framework.interfaces import AttentionContext
from framework.testing.attention import AttentionCase, build
from framework_attention.triton import attention

kernels = {}


def compiled(self, *args, grid, warmup, **words):
    kernel = run(self, *args, grid=grid, warmup=True, **words)
    assert kernel.metadata.shared <= 232448, f"{self.__name__}: more memory than a multiprocessor has"
    kernels[self.__name__] = kernel.asm["ptx"]
    return kernel


JITFunction.run = compiled
torch.cuda.get_device_capability = lambda device: (9, 0)
attention._shared_bytes = lambda device: 232448
attention._num_multiprocessors = lambda device: 132


def step(dtype, **words):
    case = AttentionCase("mixed", (400, 0), (1, 30), num_heads=8, num_kv_heads=2, head_dim=64, **words)
    built = build(case, 32, dtype)
    backend = SimpleNamespace(name="tests", device=SimpleNamespace(type="cuda"))
    plugin = attention.TritonAttention({}, AttentionContext(backend, 32, dtype, 64, 1024, 4096, False))
    layer = case.layer(built.sinks)
    shape = [built.num_blocks if size == -1 else size for size in plugin.kv_spec(layer).shape]
    plugin.bind([layer], [torch.zeros(shape, dtype=dtype)])
    heads = torch.cat((built.q, built.k, built.v), dim=1)
    plugin.plan(built.batch, 0).forward_projections(0, heads, None, None)
    return {name: kernels[name] for name in ("decode_kernel", "prompt_kernel")}


plain, capped = step(torch.bfloat16), step(torch.bfloat16, softcap=30.0)
for name in plain:
    assert capped[name].count("ex2.approx") > plain[name].count("ex2.approx"), f"{name} has no soft cap"
step(torch.bfloat16, softcap=30.0, has_sinks=True, window=128)
step(torch.float32, softcap=30.0, has_sinks=True, window=128)
print(*sorted(kernels))
"""
)


@pytest.mark.full
def test_kernels_with_soft_caps_and_sinks_compile_for_a_device(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "decode_kernel items_kernel prompt_kernel write_kernel", done.stderr[-3000:]
