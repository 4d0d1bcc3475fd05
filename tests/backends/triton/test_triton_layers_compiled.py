"""What the interpreter cannot show of a layer's kernels: that they compile for a device, and how they reach memory."""

import re
import subprocess
import sys

import pytest

from .hopper import HOPPER, absent

COMPILE = (
    HOPPER
    + """
assembly, shared = {}, {}


def compiled(self, *args, grid, warmup, **words):
    kernel = run(self, *args, grid=grid, warmup=True, **words)
    assembly[self.__name__], shared[self.__name__] = kernel.asm["ptx"].splitlines(), kernel.metadata.shared
    return kernel


JITFunction.run = compiled

from framework.interfaces import ExpertWeights, Routing
from framework_backends.cuda_device import ProgramMemory
from framework_backends.cuda_experts import CudaExperts, choose_expert_tiles
from framework_backends.cuda_linear import CudaLinear, InvariantLinear, choose_tiles
from framework_backends.triton import activations, norms

weight = torch.zeros(6144, 1024, dtype=torch.bfloat16)
product = CudaLinear(weight, weight[:, 0].contiguous(), choose_tiles(weight.dtype, *weight.shape), dependent=True)
factor, cos = weight[0], torch.zeros(32, 1, 64)
for rows in (1, 16, 32):
    product.gated_after_norm(weight[:rows], weight[:rows].clone(), factor, 1e-6)
InvariantLinear(weight, None, dependent=True)(weight[:64])
norms.rms_norm(weight[:32].view(32, 16, 64)[:, :5], factor[:64], 1e-6, dependent=True)
activations.silu_and_mul(weight[:32], dependent=True)
norms.add_rms_norm(weight[:32], weight[:32].clone(), factor.float(), 1e-6, in_place=True, dependent=True)
activations.gelu_tanh_and_mul(weight[:32], dependent=True)
activations.soft_cap(weight[:32], 30.0, dependent=True)
activations.rotate(weight[:32].view(32, 16, 64)[:, :5], cos, cos, dependent=True)
experts = ExpertWeights(*(torch.zeros(8, *shape, dtype=torch.bfloat16) for shape in ((1536, 1024), (1024, 768))))
tiles = choose_expert_tiles(torch.bfloat16, 8, 2, ProgramMemory(232448, True), batch_invariant=False)
CudaExperts(experts, Routing(2), tiles, dependent=True)(weight[:4], torch.zeros(4, 8))


def place(name, word):
    return [i for i, line in enumerate(assembly[name]) if word in line]


for name in ("gemv_kernel", "few_rows_kernel", "split_kernel"):
    wait, loads = place(name, "griddepcontrol.wait"), place(name, "v4.b32")
    assert len(wait) == 1 and loads[0] < wait[0] < loads[-1], f"{name} waits before it asks for weights"
stores = place("few_rows_kernel", "st.shared")
assert stores and min(stores) > max(place("few_rows_kernel", "mma.sync")), "operands take a detour"
for name in ("gemv_kernel", "gated_rows_kernel", "summed_rows_kernel"):  # what is there is for sums over threads
    assert shared[name] <= 128, f"{name}: numbers go from thread to thread through {shared[name]} bytes"
assert place("split_kernel", "wgmma.mma_async") and place("matrix_kernel", "wgmma.mma_async")
print(*sorted(assembly))
"""
)


@pytest.mark.full
def test_kernels_of_a_layer_compile_and_ask_for_weights_before_they_wait(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    kernels = (
        "cap_kernel few_rows_kernel gate_kernel gated_rows_kernel gemv_kernel matrix_kernel norm_kernel rotate_kernel "
        "route_kernel split_kernel summed_rows_kernel"
    )
    assert done.stdout.strip() == kernels, done.stderr[-3000:]


LONG_ROWS = (
    HOPPER
    + """
JITFunction.run = lambda self, *args, grid, warmup, **words: run(self, *args, grid=grid, warmup=True, **words)

from framework.interfaces import ExpertWeights, Routing
from framework_backends.cuda_device import ProgramMemory
from framework_backends.cuda_experts import CudaExperts, choose_expert_tiles
from framework_backends.cuda_linear import CudaLinear, choose_tiles

weight = torch.empty(4096, 14336, dtype=torch.bfloat16)
CudaLinear(weight, None, choose_tiles(weight.dtype, *weight.shape), dependent=True)(weight[:1])
experts = ExpertWeights(*(torch.empty(8, *shape, dtype=torch.bfloat16) for shape in ((1536, 2048), (2048, 768))))
tiles = choose_expert_tiles(torch.bfloat16, 8, 8, ProgramMemory(232448, True), batch_invariant=False)
CudaExperts(experts, Routing(8), tiles, dependent=True)(weight[:4, :2048], torch.zeros(4, 8))
print(triton.knobs.nvidia.cuobjdump.path)
"""
)


@pytest.mark.full
def test_weights_of_long_rows_take_turns_in_a_program_s_registers(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LONG_ROWS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("gemv_kernel", "summed_rows_kernel"):
        (cubin,) = tmp_path.rglob(f"{name}.cubin")
        command = [done.stdout.strip(), "-res-usage", str(cubin)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        # 65536 of a multiprocessor for five programs of 128 threads, in eights; all weights at once take 112 and more
        assert int(registers) <= 96 and int(stack) == 0, f"{name} takes {registers} registers and {stack} bytes more"


FIT = """
from triton.backends.nvidia.compiler import CUDABackend

CUDABackend.make_ptx = lambda self, src, metadata, *words: metadata.update(name="kernel") or "ptx"
CUDABackend.make_cubin = lambda *words: b""  # neither is needed to know the memory
met = set()


def compiled(self, *args, grid, warmup, **words):
    kernel = run(self, *args, grid=grid, warmup=True, **words)
    assert kernel.metadata.shared <= 101376, f"{self.__name__}{words}: {kernel.metadata.shared} bytes"
    met.add(self.__name__)


JITFunction.run = compiled

from framework_backends.cuda_linear import CudaLinear, InvariantLinear, choose_tiles

for rows, columns in ((4096, 1024), (28672, 4096), (4096, 14336), (151936, 1024), (128256, 4096)):
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    fast = CudaLinear(weight, None, choose_tiles(weight.dtype, rows, columns), dependent=False)
    for count in (1, 16, 64):
        fast(torch.empty(count, columns, dtype=torch.bfloat16))
    for count in (64, 128):
        InvariantLinear(weight, None, dependent=False)(torch.empty(count, columns, dtype=torch.bfloat16))
print(*sorted(met))
"""


@pytest.mark.full
@pytest.mark.parametrize("capability", [89, 120])
def test_dense_products_fit_devices_with_the_least_memory(tmp_path, capability):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = absent(capability) + FIT
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "few_rows_kernel gemv_kernel matrix_kernel split_kernel", done.stderr[-3000:]
