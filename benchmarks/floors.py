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
    "qwen3-30b-a3b": {  # https://huggingface.co/Qwen/Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "rope_theta": 1000000.0, "rope_scaling": None,
        "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
        "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {  # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "bos_token_id": 100000, "eos_token_id": 100001, "torch_dtype": "bfloat16",
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
class Mixtures:
    """Experts of all sparse layers of a decoder: `chosen` of `num_experts` a token, each of `expert` numbers."""

    num_layers: int = 0
    num_experts: int = 0
    chosen: int = 0
    expert: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Mixtures:
        count = config.get("num_experts") or config.get("n_routed_experts") or 0
        if not count:
            return cls()
        num_layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
        expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
        return cls(num_layers, count, config["num_experts_per_tok"], expert)

    @property
    def a_token(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.num_layers * self.chosen * self.expert

    def read(self, num_tokens: int) -> float:
        """Numbers that a step of so many tokens is expected to read, where each chooses evenly and for itself."""
        if not self.num_layers:
            return 0.0
        missed = (1 - self.chosen / self.num_experts) ** num_tokens
        return self.num_layers * self.expert * self.num_experts * (1 - missed)


@dataclass(frozen=True)
class Work:
    """What a decoder reads and multiplies.

    body, head  numbers in the layers' matrices, experts left out, and in the output head. The input embedding is not
                read, but for a row a token; where it is the head as well, it is read as the head
    kv_values   numbers of keys and values, or of latents, that a token leaves behind
    pair_flop   operations of attention for one query and one key, all heads and layers; of latents their expanded form
    """

    body: int
    head: int
    kv_values: int
    pair_flop: int
    itemsize: int = 2
    experts: Mixtures = Mixtures()

    @classmethod
    def of(cls, config: dict[str, Any], itemsize: int = 2) -> Work:
        """Of a config.json with a gated MLP or experts, and grouped heads or latents. itemsize: bytes of a weight and
        of a key."""
        hidden, layers, experts = config["hidden_size"], config["num_hidden_layers"], Mixtures.of(config)
        attention, kv_values, pair_flop = (_latent if "kv_lora_rank" in config else _grouped)(config)
        shared = 3 * hidden * config.get("n_shared_experts", 0) * config.get("moe_intermediate_size", 0)
        sparse = experts.num_layers * (hidden * experts.num_experts + shared)
        dense = (layers - experts.num_layers) * 3 * hidden * config["intermediate_size"]
        head = config["vocab_size"] * hidden
        return cls(layers * attention + sparse + dense, head, layers * kv_values, layers * pair_flop, itemsize, experts)

    def weight_bytes(self, num_tokens: int) -> float:
        """Read in a step of so many tokens."""
        return (self.body + self.head + self.experts.read(num_tokens)) * self.itemsize

    def decode_s(self, ceilings: Ceilings, batch: int, num_keys: int) -> float:
        """A step of `batch` decodes that read num_keys keys in all.

        Products are bound by reading weights or by multiplying, attention by reading keys; one comes behind the other.
        """
        reading = self.weight_bytes(batch) / ceilings.copy_bytes_s
        multiplying = 2 * (self.body + self.experts.a_token + self.head) * batch / ceilings.matmul_flop_s
        return max(reading, multiplying) + num_keys * self.kv_values * self.itemsize / ceilings.copy_bytes_s

    def prompt_s(self, ceilings: Ceilings, length: int) -> float:
        """A prompt up to its last hidden state: every token times every weight that it meets, and half of the pairs, as
        queries do not see keys behind them."""
        weights = self.body + self.experts.a_token
        return (2 * weights * length + self.pair_flop * length * length / 2) / ceilings.matmul_flop_s

    def workload_s(self, ceilings: Ceilings, requests: Sequence[tuple[int, int]]) -> float:
        """Requests [(prompt length, output length)] that all fit at once: their prompts, which give the first tokens,
        and then a step for each further token of the longest."""
        total = sum(self.prompt_s(ceilings, prompt) for prompt, _ in requests)
        for step in range(1, max(output for _, output in requests)):
            running = [prompt + step for prompt, output in requests if output > step]
            total += self.decode_s(ceilings, len(running), sum(running))
        return total


def _grouped(config: dict[str, Any]) -> tuple[int, int, int]:
    """Of a layer with grouped heads: numbers in its matrices, numbers that a token leaves behind, operations a pair."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    return 2 * hidden * dim * (heads + kv_heads), 2 * kv_heads * dim, 4 * heads * dim


def _latent(config: dict[str, Any]) -> tuple[int, int, int]:
    """The same of a layer with latents, whose queries are projected at once."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    assert config["q_lora_rank"] is None, "queries through a latent of their own are not counted here"
    queries, kept = hidden * heads * (nope + rope), hidden * (latent + rope)
    matrices = queries + kept + latent * heads * (nope + value) + heads * value * hidden
    return matrices, latent + rope, 2 * heads * (nope + rope + value)
