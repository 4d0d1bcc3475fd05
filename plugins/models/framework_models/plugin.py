"""What framework_models announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ANY, ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "model", "deepseek_v2", "framework_models.deepseek_v2:DeepseekV2", provides=("DeepseekV2ForCausalLM",)
        ),
        ComponentSpec(
            "model", "deepseek_v3", "framework_models.deepseek_v3:DeepseekV3", provides=("DeepseekV3ForCausalLM",)
        ),
        ComponentSpec("model", "gemma2", "framework_models.gemma2:Gemma2", provides=("Gemma2ForCausalLM",)),
        ComponentSpec("model", "gemma3", "framework_models.gemma3:Gemma3", provides=("Gemma3ForCausalLM",)),
        ComponentSpec(
            "model",
            "gemma3_images",
            "framework_models.gemma3:Gemma3ForImages",
            provides=("Gemma3ForConditionalGeneration",),
        ),
        ComponentSpec("model", "gpt2", "framework_models.gpt2:Gpt2", provides=("GPT2LMHeadModel",)),
        ComponentSpec("model", "gpt_oss", "framework_models.gpt_oss:GptOss", provides=("GptOssForCausalLM",)),
        ComponentSpec("model", "llama", "framework_models.llama:Llama", provides=("LlamaForCausalLM",)),
        ComponentSpec("model", "mistral", "framework_models.mistral:Mistral", provides=("MistralForCausalLM",)),
        ComponentSpec("model", "mixtral", "framework_models.mixtral:Mixtral", provides=("MixtralForCausalLM",)),
        ComponentSpec("model", "olmo2", "framework_models.olmo2:Olmo2", provides=("Olmo2ForCausalLM",)),
        ComponentSpec("model", "olmoe", "framework_models.olmoe:Olmoe", provides=("OlmoeForCausalLM",)),
        ComponentSpec("model", "phi3", "framework_models.phi3:Phi3", provides=("Phi3ForCausalLM",)),
        ComponentSpec("model", "qwen2", "framework_models.qwen2:Qwen2", provides=("Qwen2ForCausalLM",)),
        ComponentSpec("model", "qwen2_moe", "framework_models.qwen2_moe:Qwen2Moe", provides=("Qwen2MoeForCausalLM",)),
        ComponentSpec("model", "qwen3", "framework_models.qwen3:Qwen3", provides=("Qwen3ForCausalLM",)),
        ComponentSpec("model", "qwen3_moe", "framework_models.qwen3_moe:Qwen3Moe", provides=("Qwen3MoeForCausalLM",)),
        ComponentSpec("model", "smollm3", "framework_models.smollm3:SmolLM3", provides=("SmolLM3ForCausalLM",)),
        ComponentSpec(
            "model",
            "transformers",
            "framework_models.generic.model:TransformersModel",
            extra="transformers",
            probe="framework_models.probes:transformers",
            priority=-10,
            provides=(ANY,),
        ),
    ]
