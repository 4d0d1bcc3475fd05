"""The DeepSeek V2 family (V2, V2-Lite and their coders): softmax of all router logits, the best experts as they are.

What it shares with V3 is in `deepseek`. Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.errors import CheckpointError
from framework.interfaces import Routing
from framework_models.deepseek import Deepseek, read_groups, read_scale, read_word
from framework_models.dense import read_size, read_switch


class DeepseekV2(Deepseek):
    """DeepseekV2ForCausalLM."""

    def routing(self, config: Mapping[str, Any], num_experts: int) -> Routing:
        """Greedy, or within the best groups by their best expert; weights are scaled and not normalised."""
        read_word(config, "scoring_func", ("softmax",))
        if read_switch(config, "norm_topk_prob"):
            raise CheckpointError(
                "config.json: norm_topk_prob=true: for this family implementations differ on whether its weights are "
                "scaled as well, and none of its checkpoints has it. Use a checkpoint with norm_topk_prob=false."
            )
        k = read_size(config, "num_experts_per_tok")
        groups, chosen = 1, 1
        if read_word(config, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy":
            groups, chosen = read_groups(config, num_experts, k, least=1)
        return Routing(k, scale=read_scale(config), num_groups=groups, num_chosen_groups=chosen)
