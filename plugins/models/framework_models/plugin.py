"""What framework_models announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ANY, ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        _family("deepseek_v2", "deepseek_v2:DeepseekV2", "DeepseekV2ForCausalLM"),
        _family("deepseek_v3", "deepseek_v3:DeepseekV3", "DeepseekV3ForCausalLM"),
        _family("gemma2", "gemma2:Gemma2", "Gemma2ForCausalLM"),
        _family("gemma3", "gemma3:Gemma3", "Gemma3ForCausalLM"),
        _family("gemma3_images", "gemma3:Gemma3ForImages", "Gemma3ForConditionalGeneration"),
        _family("gpt2", "gpt2:Gpt2", "GPT2LMHeadModel"),
        _family("gpt_oss", "gpt_oss:GptOss", "GptOssForCausalLM"),
        _family("llama", "llama:Llama", "LlamaForCausalLM"),
        _family("mistral", "mistral:Mistral", "MistralForCausalLM"),
        _family("mixtral", "mixtral:Mixtral", "MixtralForCausalLM"),
        _family("olmo2", "olmo2:Olmo2", "Olmo2ForCausalLM"),
        _family("olmoe", "olmoe:Olmoe", "OlmoeForCausalLM"),
        _family("phi3", "phi3:Phi3", "Phi3ForCausalLM"),
        _family("qwen2", "qwen2:Qwen2", "Qwen2ForCausalLM"),
        _family("qwen2_moe", "qwen2_moe:Qwen2Moe", "Qwen2MoeForCausalLM"),
        _family("qwen3", "qwen3:Qwen3", "Qwen3ForCausalLM"),
        _family("qwen3_moe", "qwen3_moe:Qwen3Moe", "Qwen3MoeForCausalLM"),
        _family("smollm3", "smollm3:SmolLM3", "SmolLM3ForCausalLM"),
        ComponentSpec(
            "model",
            "transformers",
            "framework_models.generic.model:TransformersModel",
            extra="transformers",
            probe="framework_models.probes:transformers",
            priority=-10,
            provides=(ANY,),
            cases="framework_models.cases:transformers",
        ),
    ]


def _family(name: str, target: str, architecture: str) -> ComponentSpec:
    """One that `cases` has tiny configs of, for `run=check`."""
    return ComponentSpec(
        "model",
        name,
        f"framework_models.{target}",
        provides=(architecture,),
        cases=f"framework_models.cases:{name}",
    )
