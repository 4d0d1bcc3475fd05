"""What the interpreter cannot show of the products of experts: the memory that their programs take on a device."""

import subprocess
import sys

import pytest

from .hopper import absent

COMPILE = """
from types import SimpleNamespace
from triton.backends.nvidia.compiler import CUDABackend

CUDABackend.make_ptx = lambda self, src, metadata, *words: metadata.update(name="kernel") or "ptx"
CUDABackend.make_cubin = lambda *words: b""  # neither is needed to know the memory
taken = []


def compiled(self, *args, grid, warmup, **words):
    kernel = run(self, *args, grid=grid, warmup=True, **words)
    if self.__name__ == "grouped_kernel":
        taken.append(kernel.metadata.shared)
    return kernel


JITFunction.run = compiled

from framework.interfaces import ExpertWeights, Routing
from framework_backends import cuda_experts
from framework_backends.cuda_device import ProgramMemory
from framework_backends.cuda_experts import ANY, CudaExperts, choose_expert_tiles, tile_bytes

major = CAPABILITY // 10
memory = ProgramMemory.of(SimpleNamespace(major=major, shared_memory_per_block_optin=SHARED))
for dtype in (torch.bfloat16, torch.float32):
    weights = ExpertWeights(torch.zeros(8, 1536, 2048, dtype=dtype), torch.zeros(8, 2048, 768, dtype=dtype))
    tiles = choose_expert_tiles(dtype, 8, 2, memory, batch_invariant=True)
    experts = CudaExperts(weights, Routing(2), tiles, dependent=major >= 9)
    for one in tiles.grouped:
        count = 600 if one.most == ANY else one.most
        experts(torch.zeros(count, 2048, dtype=dtype), torch.zeros(count, 8))
        for each, gated in ((one.up, True), (one.down, False)):
            most, real = tile_bytes(each, dtype, memory, gated=gated), taken.pop(0)
            assert real <= most <= memory.num_bytes, f"{each} takes {real} bytes, not {most}"
            assert dtype == torch.float32 or most - real <= 64, f"{each} takes {real} bytes, far from {most}"
    assert not taken
print("done")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("capability", "shared"), [(80, 166912), (89, 101376), (90, 232448), (100, 232448), (120, 101376)]
)
def test_products_of_experts_take_the_memory_that_their_tiles_are_chosen_by(tmp_path, capability, shared):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = absent(capability) + COMPILE.replace("CAPABILITY", str(capability)).replace("SHARED", str(shared))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr[-3000:]
