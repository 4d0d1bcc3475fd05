"""An engine compiles everything before its first request: steps of any size bring no kernel that it has not met.

It runs on the host with our launches, for a device that is not there: a launch is noted, and nothing is computed.
"""

import json
import subprocess
import sys

import pytest

from .hopper import HOPPER

PROGRAM = (
    HOPPER
    + """
import json, sys
from pathlib import Path
from triton import knobs

met, wanted = set(), []


def noted(*, key, fn, **told):
    if (fn.name, key) not in met:
        met.add((fn.name, key))
        wanted.append(fn.name)
    return True  # neither compiled nor launched


knobs.runtime.jit_cache_hook = noted
empty = torch.empty
torch.empty = lambda *size, **words: empty(*size, **words).zero_()  # what is not computed is 0, a token that there is

import framework_attention.cpu
import framework_attention.triton.attention as attention
import framework_backends.cpu as cpu
from framework import LLM, SamplingParams
from framework_backends import cuda_experts, cuda_layer_ops, cuda_linear
from framework_backends.cuda import CudaBackend
from framework_backends.cuda_step_ops import CudaStepOps
from framework_backends.triton.sampler_ops import TritonSamplerOps

for module in (cuda_experts, cuda_layer_ops, cuda_linear):
    module.launches_dependent = lambda: True
attention._num_multiprocessors, attention._shared_bytes = lambda device: 132, lambda device: 232448


class Backend(cpu.CpuBackend):
    max_num_batched_tokens = 512
    _captures = True
    buckets, telling = CudaBackend.buckets, CudaBackend.telling

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.step_ops, self.layer_ops = CudaStepOps(), cuda_layer_ops.CudaLayerOps()
        self.sampler_ops, self._packer = TritonSamplerOps(), cuda_linear.CudaLinearPacker(ctx.batch_invariant)
        self._experts_packer = cuda_experts.CudaExpertsPacker(ctx.batch_invariant)

    def pack_experts(self, weights, routing):
        return self._experts_packer.pack(weights, routing)

    def compile_ahead(self, steps):
        for step in steps:
            step()
        wanted.append("behind")

    def compile(self, step, bucket):
        if bucket is not None:
            step()
        return step


class Attention(attention.TritonAttention):
    def __init__(self, options, ctx):
        knobs.runtime.interpret = True  # for the device's name alone: kernels are as they were imported
        super().__init__(options, ctx)
        knobs.runtime.interpret = False
        self.dot_f32, self.lets_begin = False, True


cpu.CpuBackend, framework_attention.cpu.CpuAttention = Backend, Attention


def serve(llm, lengths, **want):
    prompts = [{"prompt_token_ids": [i % 1000 for i in range(n)]} for n in lengths]
    params = [
        SamplingParams(max_tokens=2 + i % 7, ignore_eos=True, detokenize=False, **want) for i in range(len(lengths))
    ]
    llm.generate(prompts, params, use_tqdm=False)
    wanted.append("served")


words = [
    "backend=cpu", "attention=cpu", "engine.load_format=dummy", "engine.dtype=bfloat16", "engine.seed=1",
    "scheduler.max_num_seqs=70", "kv_cache.num_blocks=400", "engine.max_model_len=4400",
]
with LLM(Path(sys.argv[1]), overrides=words) as llm:
    wanted.append("started")
    serve(llm, [5])
    for lengths in ([1], [16, 1], [33], [3 * i + 1 for i in range(69)], [4300, 40], [10] * 75):
        serve(llm, lengths)
    for want in ({"temperature": 0}, {"top_p": 0.9, "top_k": 50}, {"logprobs": 3}, {"presence_penalty": 0.5}):
        serve(llm, [9], **want)
        serve(llm, [9 + i for i in range(40)], **{"temperature": 0.7, **want})
print(*wanted)
"""
)
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 1e6,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "eos_token_id": 1, "bos_token_id": 0, "attention_bias": False,
}  # fmt: skip
MIXTURE = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 128,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=[DENSE, MIXTURE], ids=["dense", "mixture"])
def wanted(request, tmp_path_factory):
    """Names of the kernels that were not there when they were launched, in order, between words that say where."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(request.param))
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    assert ("grouped_kernel" in words) == (request.param is MIXTURE)
    return words


def test_kernels_are_compiled_together_before_anything_runs(wanted):
    profiled = wanted.index("behind")
    last = wanted.index("behind", profiled + 1)
    ahead, behind = wanted[profiled:last], wanted[last + 1 : wanted.index("started")]
    assert wanted[:profiled] and len(ahead) > 30
    assert behind == []


def test_steps_of_any_size_and_likely_samplers_bring_no_kernel(wanted):
    served = wanted[wanted.index("started") + 1 :]
    assert served.count("served") == 15
    assert set(served) == {"served"}
