"""Shapes of public models, and the least time that their work can take on a machine of two ceilings: arithmetic alone.

A step reads every weight once and the keys and values of its contexts, and multiplies each token by every weight.
Nothing is measured and no device is touched here. `benchmarks/cuda.py` puts these beside what it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {  # https://huggingface.co/Qwen/Qwen3-0.6B
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "rope_theta": 1000000,
        "rope_scaling": None, "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
        "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {  # https://huggingface.co/meta-llama/Llama-3.1-8B
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
"""config.json of each, as published."""


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at most, measured: bytes copied a second (read and written both count), and operations a
    second of a large matrix product in the model's dtype."""

    copy_bytes_s: float
    matmul_flop_s: float


@dataclass(frozen=True)
class Work:
    """What a decoder reads and multiplies.

    body, head  numbers in the layers' matrices and in the output head. The input embedding is not read, but for a row
                a token; where it is the head as well, it is read as the head
    kv_values   numbers of keys and values that a token leaves behind
    pair_flop   operations of attention for one query and one key, all heads and layers
    """

    body: int
    head: int
    kv_values: int
    pair_flop: int
    itemsize: int = 2

    @classmethod
    def of(cls, config: dict[str, Any], itemsize: int = 2) -> Work:
        """Of a config.json with grouped heads and a gated MLP. itemsize: bytes of a weight and of a key."""
        hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        layers, dim = config["num_hidden_layers"], config.get("head_dim") or hidden // heads
        layer = 2 * hidden * dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        head = config["vocab_size"] * hidden
        return cls(layers * layer, head, 2 * layers * kv_heads * dim, 4 * layers * heads * dim, itemsize)

    @property
    def weight_bytes(self) -> int:
        """Read in each step."""
        return (self.body + self.head) * self.itemsize

    def decode_s(self, ceilings: Ceilings, batch: int, num_keys: int) -> float:
        """A step of `batch` decodes that read num_keys keys in all.

        Products are bound by reading weights or by multiplying, attention by reading keys; one comes behind the other.
        """
        reading = self.weight_bytes / ceilings.copy_bytes_s
        multiplying = 2 * (self.body + self.head) * batch / ceilings.matmul_flop_s
        return max(reading, multiplying) + num_keys * self.kv_values * self.itemsize / ceilings.copy_bytes_s

    def prompt_s(self, ceilings: Ceilings, length: int) -> float:
        """A prompt up to its last hidden state: every token times every weight, and half of the pairs, as queries do
        not see keys behind them."""
        return (2 * self.body * length + self.pair_flop * length * length / 2) / ceilings.matmul_flop_s

    def workload_s(self, ceilings: Ceilings, requests: Sequence[tuple[int, int]]) -> float:
        """Requests [(prompt length, output length)] that all fit at once: their prompts, which give the first tokens,
        and then a step for each further token of the longest."""
        total = sum(self.prompt_s(ceilings, prompt) for prompt, _ in requests)
        for step in range(1, max(output for _, output in requests)):
            running = [prompt + step for prompt, output in requests if output > step]
            total += self.decode_s(ceilings, len(running), sum(running))
        return total
