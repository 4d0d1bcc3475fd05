"""What framework_attention announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "attention",
            "triton",
            "framework_attention.triton.attention:TritonAttention",
            extra="cuda",
            probe="framework_attention.probes:triton",
            priority=10,
            provides=("cuda",),
        ),
        ComponentSpec(
            "attention",
            "mla_triton",
            "framework_attention.triton.latent:LatentTriton",
            extra="cuda",
            probe="framework_attention.probes:triton",
            priority=9,
            provides=("cuda",),
        ),
        ComponentSpec(
            "attention",
            "flash_attn",
            "framework_attention.flash_attn:FlashAttn",
            extra="flash-attn",
            probe="framework_attention.probes:flash_attn",
            priority=5,
            provides=("cuda",),
        ),
        ComponentSpec(
            "attention",
            "flashinfer",
            "framework_attention.flashinfer:FlashInfer",
            extra="flashinfer",
            probe="framework_attention.probes:flashinfer",
            priority=4,
            provides=("cuda",),
        ),
        ComponentSpec("attention", "cpu", "framework_attention.cpu:CpuAttention", provides=("cpu",)),
        ComponentSpec("attention", "mla_torch", "framework_attention.mla_torch:MlaTorch", provides=("cpu",)),
    ]
