"""What framework_models announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec("model", "llama", "framework_models.llama:Llama", provides=("LlamaForCausalLM",)),
        ComponentSpec("model", "mistral", "framework_models.mistral:Mistral", provides=("MistralForCausalLM",)),
        ComponentSpec("model", "qwen2", "framework_models.qwen2:Qwen2", provides=("Qwen2ForCausalLM",)),
        ComponentSpec("model", "qwen3", "framework_models.qwen3:Qwen3", provides=("Qwen3ForCausalLM",)),
        ComponentSpec("model", "smollm3", "framework_models.smollm3:SmolLM3", provides=("SmolLM3ForCausalLM",)),
    ]
