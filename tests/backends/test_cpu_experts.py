"""Mixtures of experts on the CPU: equal to their definition, and a row's bits its own on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from framework.interfaces import BackendContext, Experts, ExpertWeights, Routing
from framework.layers.experts import ReferenceExperts, combine
from framework_backends.cpu import CpuBackend
from framework_backends.cpu_experts import CpuExperts, _combine
from framework_backends.cpu_linear import PlainLinear

E, H, WIDTH, K = 9, 48, 40, 3
ROUTINGS = {
    "softmax": Routing(K),
    "normalised": Routing(K, normalizes=True),
    "selected": Routing(K, scores="selected"),
    "sigmoid": Routing(K, scores="sigmoid", normalizes=True, scale=2.5, bias=torch.linspace(-0.4, 0.4, E)),
    "groups": Routing(K, num_groups=3, num_chosen_groups=2),
}
# 8 bits of mantissa, rounded behind each product
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(dtype: torch.dtype, *, bias: bool = True, activation: Any = "clamped") -> ExpertWeights:
    return ExpertWeights(
        normal(E, 2 * WIDTH, H, seed=1, dtype=dtype) * H**-0.5,
        normal(E, H, WIDTH, seed=2, dtype=dtype) * WIDTH**-0.5,
        normal(E, 2 * WIDTH, seed=3, dtype=dtype) if bias else None,
        normal(E, H, seed=4, dtype=dtype) if bias else None,
        activation=activation,
        limit=1.0,
    )


def packed(weights: ExpertWeights, routing: Routing, *, invariant: bool = False) -> Experts:
    dtype = str(weights.down.dtype).removeprefix("torch.")
    return CpuBackend({}, BackendContext(dtype=dtype, batch_invariant=invariant)).pack_experts(weights, routing)


@pytest.mark.parametrize("invariant", [False, True], ids=("fast", "invariant"))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_counts_are_those_of_the_definition(routing: str, dtype: torch.dtype, invariant: bool) -> None:
    for weights in (made(dtype), made(dtype, bias=False, activation="silu")):
        reference = ReferenceExperts(weights, ROUTINGS[routing])
        ours = packed(weights, ROUTINGS[routing], invariant=invariant)
        for num_tokens in (1, 2, 7, 40):
            x, logits = normal(num_tokens, H, seed=5, dtype=dtype), normal(num_tokens, E, seed=6)
            found, wanted = ours(x, logits), reference(x, logits)
            assert found.dtype == dtype and wanted.abs().max() > 0.3
            torch.testing.assert_close(found.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(ours.counts, reference.counts)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_invariant_rows_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    experts = packed(made(dtype), ROUTINGS["sigmoid"], invariant=True)
    x, logits = normal(300, H, seed=5, dtype=dtype), normal(300, E, seed=6)
    logits[:, 0] += 8  # one expert gets more rows than a product takes at once
    whole = experts(x, logits)
    for rows in (1, 2, 3, 7, 8, 16, 33, 280):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rows))[:rows]
        assert torch.equal(experts(x[order], logits[order]), whole[order])


def test_rows_of_plain_float32_products_do_differ_so_the_check_above_can_fail() -> None:
    experts = CpuExperts(
        made(torch.float32), ROUTINGS["softmax"], PlainLinear, CpuBackend({}, BackendContext()).layer_ops.silu_and_mul
    )
    x, logits = normal(300, H, seed=5), normal(300, E, seed=6)
    whole = experts(x, logits)
    alone = torch.cat([experts(x[i : i + 1], logits[i : i + 1]) for i in range(100)])
    assert not torch.equal(alone, whole[:100])


def test_all_tokens_may_choose_the_same_experts() -> None:
    weights, logits = made(torch.float32), torch.zeros(50, E)
    x = normal(50, H, seed=5)
    experts = packed(weights, ROUTINGS["softmax"])
    torch.testing.assert_close(experts(x, logits), ReferenceExperts(weights, ROUTINGS["softmax"])(x, logits))
    assert experts.counts.tolist() == [50] * K + [0] * (E - K)


def test_every_expert_of_a_token_and_one_alone() -> None:
    weights, x, logits = made(torch.float32), normal(6, H, seed=5), normal(6, E, seed=6)
    for routing in (Routing(E, normalizes=True), Routing(1)):
        torch.testing.assert_close(packed(weights, routing)(x, logits), ReferenceExperts(weights, routing)(x, logits))


def test_no_tokens_give_no_rows() -> None:
    experts = packed(made(torch.float32), ROUTINGS["softmax"])
    assert experts(torch.empty(0, H), torch.empty(0, E)).shape == (0, H)
    assert experts.counts.sum() == 0


def test_padding_is_not_counted() -> None:
    experts = packed(made(torch.float32), ROUTINGS["softmax"])
    experts(normal(5, H, seed=5), normal(5, E, seed=6), torch.tensor([2], dtype=torch.int32))
    assert experts.counts.sum() == 2 * K


def test_sum_has_the_bits_of_the_definition() -> None:
    outputs, shares = normal(31, 4, H, seed=7, dtype=torch.bfloat16), normal(31, 4, seed=8)
    found = _combine(list(outputs.unbind(1)), shares, torch.bfloat16)
    assert torch.equal(found, combine(outputs, shares, torch.bfloat16))
