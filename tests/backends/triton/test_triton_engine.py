"""A whole engine whose steps are prepared, attended and committed by our kernels, in the interpreter, and the host's.

Steps with prompts run padded, from the host twins that a recorded step has: bounds alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams
from framework.interfaces import Bucket
from framework.worker.ragged import Forward, RaggedSteps
from framework_backends.cpu import CpuBackend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the device that is visible")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 1e6,
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "eos_token_id": 1, "bos_token_id": 0, "attention_bias": False,
}  # fmt: skip
WORDS = (
    "backend=cpu", "attention=cpu", "engine.load_format=dummy", "engine.dtype=float32", "scheduler.max_num_seqs=5",
    "kv_cache.num_blocks=40", "engine.max_model_len=120", "scheduler.max_num_batched_tokens=48",
)  # fmt: skip
LENGTHS = (3, 50, 9, 1)


def served(folder: Path, *words: str) -> list[Any]:
    prompts = [[(7 * i + j) % 300 for j in range(n)] for i, n in enumerate(LENGTHS)]
    params = [SamplingParams(max_tokens=2 + i % 3, temperature=0, ignore_eos=True) for i in range(len(LENGTHS))]
    with LLM(folder, overrides=[*WORDS, *words]) as llm:
        once = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params[::-1], use_tqdm=False)  # what is cached is not computed
    return [one.outputs[0].token_ids for one in (*once, *again)]


@pytest.mark.parametrize("invariant", ["false", "true"])
def test_tokens_are_those_of_the_host(invariant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework_attention.triton.attention import TritonAttention
    from framework_backends.cuda_step_ops import CudaStepOps

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    word = f"engine.batch_invariant={invariant}"
    wanted = served(tmp_path, word)

    class OurKernels(CpuBackend):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.step_ops = CudaStepOps()

        def buckets(self, *_: int) -> list[Bucket]:
            decodes = [Bucket(n, n, n, 1) for n in (1, 2, 4)]
            return decodes + [Bucket(n, 5, 5, n) for n in (16, 48)]

        def compile(self, step: Callable[..., Any], bucket: Bucket | None) -> Callable[..., Any]:
            return step

    class AnySplit(TritonAttention):
        caps = replace(TritonAttention.caps, graph="always")

    ran: list[int] = []
    forward = RaggedSteps.forward

    def noted(self: RaggedSteps, bucket: Bucket) -> Forward:
        ran.append(bucket.tokens)
        return forward(self, bucket)

    monkeypatch.setattr(RaggedSteps, "forward", noted)
    monkeypatch.setattr("framework_backends.cpu.CpuBackend", OurKernels)
    monkeypatch.setattr("framework_attention.cpu.CpuAttention", AnySplit)
    assert served(tmp_path, word) == wanted
    assert {16, 48} == set(ran)
