"""Routing against the router classes of transformers, one by one: the same experts, with the same weights."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from framework.interfaces import Routing
from framework.layers.experts import route

E, H, K, TOKENS = 24, 16, 5, 200
SCALE = 2.5
GROUPS = {"num_groups": 6, "num_chosen_groups": 3}
BIAS = torch.randn(E, generator=torch.Generator().manual_seed(9)) * 0.4  # scores and bias fall below 0
DEEP = {"routed_scaling_factor": SCALE, "n_group": 6, "topk_group": 3}
CASES = {
    "mixtral": (MixtralTopKRouter, {}, Routing(K, normalizes=True)),
    "qwen2": (Qwen2MoeTopKRouter, {"norm_topk_prob": False}, Routing(K)),
    "qwen2_normalised": (Qwen2MoeTopKRouter, {"norm_topk_prob": True}, Routing(K, normalizes=True)),
    "qwen3": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, Routing(K)),
    "qwen3_normalised": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, Routing(K, normalizes=True)),
    "olmoe": (OlmoeTopKRouter, {"norm_topk_prob": False}, Routing(K)),
    "gpt_oss": (GptOssTopKRouter, {}, Routing(K, scores="selected")),
    "deepseek_v2": (DeepseekV2TopkRouter, {**DEEP, "topk_method": "greedy"}, Routing(K, scale=SCALE)),
    "deepseek_v2_groups": (
        DeepseekV2TopkRouter,
        {**DEEP, "topk_method": "group_limited_greedy"},
        Routing(K, scale=SCALE, **GROUPS),
    ),
    **{
        f"{name}{'' if normalizes else '_not_normalised'}": (
            router,
            {**DEEP, "norm_topk_prob": normalizes},
            Routing(K, "sigmoid", normalizes, SCALE, BIAS, **GROUPS, group_score="top2"),
        )
        for name, router in {"deepseek_v3": DeepseekV3TopkRouter, "glm4": Glm4MoeTopkRouter}.items()
        for normalizes in (True, False)
    },
}


def made(case):
    """(router with random weights and biases, our routing)."""
    router_class, words, routing = CASES[case]
    sizes = {"num_experts_per_tok": K, "num_local_experts": E, "num_experts": E, "n_routed_experts": E}
    router = router_class(SimpleNamespace(**sizes, hidden_size=H, **words))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*router.named_parameters(), *router.named_buffers()]:
            value.copy_(BIAS if name == "e_score_correction_bias" else torch.randn(value.shape, generator=random) * 0.5)
    return router, routing


def dense(ids, weights):
    """[T, E] weight of every expert: neither says in which order it chose."""
    return torch.zeros(len(ids), E).scatter(1, ids, weights)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_experts_and_weights_equal_the_routers_of_transformers(case):
    router, routing = made(case)
    logits, weights, ids = router(torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(2)))
    found_ids, found_weights = route(logits, routing)
    assert torch.equal(found_ids.sort(-1).values, ids.sort(-1).values)
    assert len({tuple(row) for row in ids.sort(-1).values.tolist()}) > TOKENS // 4  # tokens do differ
    torch.testing.assert_close(dense(found_ids, found_weights), dense(ids, weights), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", [case for case, (_, _, routing) in CASES.items() if routing.bias is not None])
@torch.no_grad()
def test_the_bias_of_these_cases_does_change_choices_so_the_check_above_can_fail(case):
    router, routing = made(case)
    logits = router(torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(2)))[0]
    without = Routing(K, "sigmoid", **GROUPS, group_score="top2")
    assert (route(logits, routing)[0].sort(-1).values != route(logits, without)[0].sort(-1).values).any(1).sum() > 50
    assert ((logits.sigmoid() + BIAS) < 0).any()  # where a mask of 0 instead of -inf would choose masked experts
