"""The dense Qwen3 family: Llama with RMS norms over each query and key head. Its mixtures of experts are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework.errors import CheckpointError
from framework.interfaces import ModelContext
from framework.layers.attention import QKNorm
from framework.layers.decoder import AttentionBlock
from framework.layers.rope import Rotary
from framework_models.dense import DenseConfig, Family
from framework_models.llama import Llama
from framework_models.qwen2 import WINDOW_KEYS, slides_behind


class Qwen3(Llama):
    """Qwen3ForCausalLM. head_dim is 128 when config.json has none, and the feed-forward block has no bias."""

    family: ClassVar[Family] = Family(
        knows=("attention_bias", "use_qk_norm", *WINDOW_KEYS), head_dim=128, window=4096, slides=slides_behind
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's. Some checkpoints say `use_qk_norm`: the family has no other form."""
        if config.get("use_qk_norm") not in (None, True):
            raise CheckpointError(
                f"config.json: use_qk_norm={config['use_qk_norm']!r}, but {cls.__name__} always has norms of heads. "
                "Take the key out, or use a checkpoint of another architecture."
            )
        return super().read_config(config)

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        """Llama's, with norms of heads."""
        return super().attention(ctx, dense, index, rotary, qk_norm=QKNorm(dense.rms_norm_eps), **others)
