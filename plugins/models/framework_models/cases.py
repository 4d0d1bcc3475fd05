"""What `run=check` builds the families with: config.json of tiny checkpoints, in which whatever a family has is on.

Sizes are small and odd: head_dim is not hidden_size / heads, windows and groups are shorter than a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from framework.testing.model_bench import MAX_LEN, ModelCase

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _cases(module: str, name: str, architecture: str, *edits: dict[str, Any]) -> Callable[[], list[ModelCase]]:
    """A function that makes a case of each `edits` of the sizes; None drops a key. The family is imported then."""

    def made() -> list[ModelCase]:
        from importlib import import_module

        target = getattr(import_module(f"framework_models.{module}"), name)
        cases = []
        for number, own in enumerate(edits):
            config = {k: v for k, v in {**_SIZES, "architectures": [architecture], **own}.items() if v is not None}
            config = deepcopy(config)  # whoever builds of it may write into what is nested
            cases.append(ModelCase(target, config, f"case {number + 1}" if len(edits) > 1 else ""))
        return cases

    return made


llama = _cases("llama", "Llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True})
mistral = _cases("mistral", "Mistral", "MistralForCausalLM", {"sliding_window": 9})
qwen2 = _cases(
    "qwen2",
    "Qwen2",
    "Qwen2ForCausalLM",
    {"head_dim": None},
    {"head_dim": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
)
qwen3 = _cases("qwen3", "Qwen3", "Qwen3ForCausalLM", {"attention_bias": True})
smollm3 = _cases("smollm3", "SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "head_dim": None})
olmo2 = _cases("olmo2", "Olmo2", "Olmo2ForCausalLM", {"head_dim": None})
phi3 = _cases("phi3", "Phi3", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": 9})
gemma2 = _cases(
    "gemma2",
    "Gemma2",
    "Gemma2ForCausalLM",
    {
        "sliding_window": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 24,
        "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
)  # fmt: skip
gemma3 = _cases(
    "gemma3",
    "Gemma3",
    "Gemma3ForCausalLM",
    {
        "sliding_window": 9, "query_pre_attn_scalar": 24, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
)  # fmt: skip
gemma3_images = _cases(
    "gemma3",
    "Gemma3ForImages",
    "Gemma3ForConditionalGeneration",
    {
        **dict.fromkeys(_SIZES), "vocab_size": _SIZES["vocab_size"], "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 9,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2,
        },
    },
)  # fmt: skip
gpt2 = _cases(
    "gpt2",
    "Gpt2",
    "GPT2LMHeadModel",
    {
        **dict.fromkeys(_SIZES), "vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": MAX_LEN,
        "activation_function": "gelu_new", "tie_word_embeddings": True,
    },
)  # fmt: skip
mixtral = _cases("mixtral", "Mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})
olmoe = _cases("olmoe", "Olmoe", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None})
qwen2_moe = _cases(
    "qwen2_moe",
    "Qwen2Moe",
    "Qwen2MoeForCausalLM",
    {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "head_dim": None, "mlp_only_layers": [0]},
)
qwen3_moe = _cases(
    "qwen3_moe", "Qwen3Moe", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}
)
gpt_oss = _cases(
    "gpt_oss",
    "GptOss",
    "GptOssForCausalLM",
    {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    },
)  # fmt: skip
deepseek_v2 = _cases(
    "deepseek_v2",
    "DeepseekV2",
    "DeepseekV2ForCausalLM",
    {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
)
deepseek_v3 = _cases(
    "deepseek_v3", "DeepseekV3", "DeepseekV3ForCausalLM", {**_LATENT, "q_lora_rank": 12, "norm_topk_prob": True}
)
transformers = _cases(
    "generic.model",
    "TransformersModel",
    "StableLmForCausalLM",
    {"model_type": "stablelm", "head_dim": None, "use_qkv_bias": True, "eos_token_id": None},
)
