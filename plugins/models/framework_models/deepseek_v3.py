"""The DeepSeek V3 family (V3, R1 and others that declare DeepseekV3ForCausalLM): sigmoid scores, balanced by a bias.

What it shares with V2 is in `deepseek`. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from framework.interfaces import ModelContext, Routing
from framework_models.deepseek import Deepseek, read_groups, read_scale, read_word
from framework_models.dense import read_size, read_switch


class DeepseekV3(Deepseek):
    """DeepseekV3ForCausalLM."""

    def routing(self, config: Mapping[str, Any], num_experts: int) -> Routing:
        """Within the best groups by the sum of their two best experts; weights are scaled, normalised or not."""
        read_word(config, "scoring_func", ("sigmoid",))
        read_word(config, "topk_method", ("noaux_tc",))
        k = read_size(config, "num_experts_per_tok")
        groups, chosen = read_groups(config, num_experts, k, least=2)
        return Routing(
            k,
            scores="sigmoid",
            normalizes=read_switch(config, "norm_topk_prob", True),
            scale=read_scale(config),
            num_groups=groups,
            num_chosen_groups=chosen,
            group_score="top2",
        )

    def layer_routing(self, ctx: ModelContext, prefix: str, routing: Routing) -> Routing:
        """The bias is the layer's own, and stays float32: it is larger than what tells scores apart."""
        name, size = f"{prefix}.gate.e_score_correction_bias", self.mixture.num_experts
        return replace(routing, bias=ctx.weights.take(name, (size,), torch.float32))
