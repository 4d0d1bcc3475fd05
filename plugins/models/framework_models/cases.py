"""What `run=check` builds the families with: config.json of tiny checkpoints, in which whatever a family has is on.

Each key has a value that changes the model. What is on by default, and what another key says as well, is left out; so
are experts in MXFP4, which random bytes are not. The generic path is built with one architecture of each kind of layer
that it reads off. Sizes are small and odd: head_dim is not hidden_size / heads, windows and groups are shorter than a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from framework.testing.model_bench import MAX_LEN, ModelCase

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": None, "num_hidden_layers": 3, "attention_bias": True, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "moe_layer_freq": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 0.7, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1],
}  # fmt: skip
_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
_GEMMA: dict[str, Any] = {
    "sliding_window": 9, "query_pre_attn_scalar": 24, "final_logit_softcapping": 6.0, "attention_bias": True,
    "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


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


llama = _cases(
    "llama",
    "Llama",
    "LlamaForCausalLM",
    {
        "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
)  # fmt: skip
mistral = _cases("mistral", "Mistral", "MistralForCausalLM", {"sliding_window": 9})
qwen2 = _cases("qwen2", "Qwen2", "Qwen2ForCausalLM", {}, {**_WINDOWS, "max_window_layers": 1})
qwen3 = _cases("qwen3", "Qwen3", "Qwen3ForCausalLM", {**_WINDOWS, "max_window_layers": 1, "attention_bias": True})
smollm3 = _cases(
    "smollm3",
    "SmolLM3",
    "SmolLM3ForCausalLM",
    {**_WINDOWS, "no_rope_layers": [1, 0], "attention_bias": True, "mlp_bias": True},
)
olmo2 = _cases("olmo2", "Olmo2", "Olmo2ForCausalLM", {"attention_bias": True})
phi3 = _cases(
    "phi3",
    "Phi3",
    "Phi3ForCausalLM",
    {
        "sliding_window": 9, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.0, 1.5, 2.5, 4.0],
        },
    },
)  # fmt: skip
gemma2 = _cases(
    "gemma2",
    "Gemma2",
    "Gemma2ForCausalLM",
    {
        **_GEMMA, "attn_logit_softcapping": 5.0, "layer_types": ["full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
)  # fmt: skip
gemma3 = _cases(
    "gemma3",
    "Gemma3",
    "Gemma3ForCausalLM",
    {
        **_GEMMA, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
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
            "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 9,
            "query_pre_attn_scalar": 24, "final_logit_softcapping": 6.0, "attention_bias": True, "rms_norm_eps": 1e-3,
            "rope_theta": 1000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 100.0, "sliding_window_pattern": 2,
        },
    },
)  # fmt: skip
gpt2 = _cases(
    "gpt2",
    "Gpt2",
    "GPT2LMHeadModel",
    {
        **dict.fromkeys(_SIZES), "vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": MAX_LEN,
        "n_inner": 40, "layer_norm_epsilon": 1e-3, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "gelu_new", "tie_word_embeddings": True,
    },
)  # fmt: skip
mixtral = _cases(
    "mixtral",
    "Mixtral",
    "MixtralForCausalLM",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
)
olmoe = _cases(
    "olmoe",
    "Olmoe",
    "OlmoeForCausalLM",
    {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
)
qwen2_moe = _cases(
    "qwen2_moe",
    "Qwen2Moe",
    "Qwen2MoeForCausalLM",
    {**_EXPERTS, **_WINDOWS, "max_window_layers": 2, "shared_expert_intermediate_size": 20},
)
qwen3_moe = _cases("qwen3_moe", "Qwen3Moe", "Qwen3MoeForCausalLM", {**_EXPERTS, **_WINDOWS, "attention_bias": True})
gpt_oss = _cases(
    "gpt_oss",
    "GptOss",
    "GptOssForCausalLM",
    {
        "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "truncate": False,
        },
    },
)  # fmt: skip
deepseek_v2 = _cases(
    "deepseek_v2",
    "DeepseekV2",
    "DeepseekV2ForCausalLM",
    {**_LATENT, "topk_method": "group_limited_greedy"},
    {**_LATENT, "n_group": None, "topk_group": None, "q_lora_rank": 12, "rope_interleave": False},
)
deepseek_v3 = _cases(
    "deepseek_v3", "DeepseekV3", "DeepseekV3ForCausalLM", {**_LATENT, "q_lora_rank": 12, "rope_interleave": False}
)
transformers = _cases(
    "generic.model",
    "TransformersModel",
    "StableLmForCausalLM",
    {
        "model_type": "stablelm", "head_dim": None, "rms_norm_eps": None, "layer_norm_eps": 1e-3, "use_qkv_bias": True,
        "qk_layernorm": True, "use_parallel_residual": True, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    {
        **_GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0,
        "eos_token_id": None,
    },
    {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_act": None, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 9, "eos_token_id": None,
    },
)  # fmt: skip
