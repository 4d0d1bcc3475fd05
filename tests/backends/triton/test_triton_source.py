"""What the interpreter cannot show: that kernels cast what they load, and that they compile for a device."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import framework_backends.triton

from .hopper import HOPPER

FOLDER = Path(framework_backends.triton.__file__).parent
LACKING = {"libdevice", "autotune", "inline_asm_elementwise"}


def kernels():
    """[(file, function)] of everything that Triton compiles."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield path.name, node


def test_logits_are_cast_to_float32_where_they_are_loaded():
    # Arithmetic on bfloat16 is silently wrong in the interpreter, and rounded on a device.
    loads = 0
    for file, function in kernels():
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "tl.load":
                continue
            if re.search(r"\blogits\b", ast.unparse(node.args[0])):
                loads += 1
                cast = ast.unparse(parents[parents[node]])
                assert cast.endswith(".to(tl.float32)"), f"{file}: {function.name} uses {cast}"
    assert loads >= 3


def test_kernels_use_nothing_that_the_interpreter_lacks():
    for file, function in kernels():
        names = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
        assert not names & LACKING, f"{file}: {function.name}"


COMPILES_ONLY = (
    HOPPER
    + """
JITFunction.run = lambda self, *args, grid, warmup, **words: run(self, *args, grid=grid, warmup=True, **words)
"""
)

SAMPLER_KERNELS = """
from framework.batch import Rows
from framework_backends.triton.sampler_ops import TritonSamplerOps

rows, vocab = 4, 151936
ints, floats = torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
pool, words = torch.zeros(rows, 64, dtype=torch.int32), torch.zeros(rows, vocab // 32, dtype=torch.int32)
long = torch.zeros(rows, dtype=torch.int64)
where = Rows(long, ints, long, long, long.view(rows, 1)[:, :0], ints, ints.numpy())
chain = [
    ("bitmask", {"words": words, "logits_rows": None}),
    ("allowed", {"words": words, "place": ints}),
    ("ban_until", {"until": ints, "ids": pool}),
    ("bias", {"count": ints, "ids": pool, "ids_place": ints, "values": pool.float(), "values_place": ints}),
    ("penalties", {"repetition": floats, "frequency": floats, "presence": floats, "seen": pool, "place": ints}),
    ("scale", {"factor": floats}),
    ("min_p", {"log_min_p": floats}),
    ("top_k", {"k": ints}),
    ("top_p", {"top_p": floats}),
    ("draw", {"draws": ints}),
]
logits, ops = torch.zeros(rows, vocab, dtype=torch.bfloat16), TritonSamplerOps()
ops.sample(logits, where, chain, (floats, floats))
ops.sample(logits, where, chain[5:6] + chain[-1:], None)
TritonSamplerOps(goes_on=False).sample(logits, where, chain[5:6] + chain[-1:], None)
ops.bounds(logits, where, chain[6:9], floats, floats)
ops.logprobs(logits, long, 5, is_log=True)
ops.apply(logits, where, chain[5:6])
print("compiled")
"""


STEP_KERNELS = f"""
from runpy import run_path
from framework_backends.cuda_step_ops import CudaStepOps
from framework_backends.triton.outbox import write_outbox

memory, ops = run_path({str(Path(__file__).parent.parent / "conftest.py")!r})["memory"], CudaStepOps()
staged = torch.zeros(1, 160, dtype=torch.uint8)
for sizes in ([16], [1, 16]):
    step = memory([(1, 7, True)] * 4, sizes, 1)
    ops.prepare(*step, 4, 4, 4, goes_on=False)
    ops.prepare(*step, 4, 9, 0, goes_on=False)
    ops.prepare(*step, 1, 1, 1, goes_on=False)
    ops.prepare_decodes(*step, 4)
    ops.post_update(*step, 4, 4, torch.zeros(4, dtype=torch.int64))
    ops.apply_spans(step[1].token_ids.view(-1), [1], [3], torch.zeros(3, dtype=torch.int32))
    ops.apply_rows(step[1].token_ids.view(torch.uint8), torch.zeros(1, dtype=torch.int64), staged)
    write_outbox([staged[0]] * len(sizes), [0] * len(sizes), staged, torch.zeros(1, dtype=torch.int32))
print("compiled")
"""


@pytest.mark.full
@pytest.mark.parametrize("kernels", (SAMPLER_KERNELS, STEP_KERNELS), ids=("sampler", "step"))
def test_kernels_compile_for_a_device_that_is_not_there(tmp_path, kernels):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_ONLY + kernels], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "compiled\n", done.stderr[-3000:]
