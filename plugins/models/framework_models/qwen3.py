"""The dense Qwen3 family: Llama with RMS norms over each query and key head. Its mixtures of experts are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from framework_models.dense import DenseConfig, read_dense
from framework_models.llama import Llama


class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    has_head_norms: ClassVar[bool] = True

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's; head_dim is 128 when config.json has none, and the feed-forward block has no bias."""
        return read_dense(config, head_dim=128, window_key=True)
