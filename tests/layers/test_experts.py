"""Routing and the weighted sum of experts by their definition: exact values, algebra, counts."""

import pytest
import torch

from framework.interfaces import ExpertWeights, Routing
from framework.layers.experts import ReferenceExperts, activate, combine, count_tokens, route

E, H, WIDTH = 8, 12, 10


def made(activation="silu", bias=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g) * 0.5

    biases = (random(E, 2 * WIDTH), random(E, H)) if bias else (None, None)
    return ExpertWeights(random(E, 2 * WIDTH, H), random(E, H, WIDTH), *biases, activation=activation, limit=0.8)


def inputs(tokens=7, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, H, generator=g), torch.randn(tokens, E, generator=g)


def test_experts_come_best_first_and_equal_ones_by_their_id():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0, 3.0, 1.0]])
    ids, weights = route(logits, Routing(4))
    assert ids.tolist() == [[1, 2, 4, 5]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2, 4, 5]])


def test_many_equal_scores_give_the_lowest_ids():
    ids, _ = route(torch.zeros(3, 128), Routing(8, scores="sigmoid"))
    assert ids.tolist() == [list(range(8))] * 3


def test_normalised_softmax_is_the_softmax_of_the_selected_logits():
    _, logits = inputs()
    ids, normalised = route(logits, Routing(3, normalizes=True))
    same, selected = route(logits, Routing(3, scores="selected"))
    assert torch.equal(ids, same)
    torch.testing.assert_close(normalised, selected)


def test_scale_holds_with_and_without_normalisation():
    _, logits = inputs()
    for normalizes in (False, True):
        plain = route(logits, Routing(3, scores="sigmoid", normalizes=normalizes))[1]
        scaled = route(logits, Routing(3, scores="sigmoid", normalizes=normalizes, scale=2.5))[1]
        torch.testing.assert_close(scaled, plain * 2.5)


def test_bias_changes_the_choice_and_no_weight():
    logits, bias = torch.tensor([[1.0, 0.5, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = route(logits, Routing(2, scores="sigmoid", bias=bias))
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [3, 0]])


def test_a_bias_that_dwarfs_the_scores_loses_nothing_of_the_weights():
    logits = torch.tensor([[1e-3, -1e-3, 0.0, 0.0]])
    _, weights = route(logits, Routing(2, scores="sigmoid", bias=torch.tensor([1e8, 1e8, 0.0, 0.0])))
    assert torch.equal(weights, logits.sigmoid()[:, :2])


def test_experts_of_other_groups_are_out_also_where_scores_are_below_zero():
    bias = torch.tensor([-5.0, -5.0, -5.0, -5.0, -9.0, -9.0, -9.0, -9.0])
    routing = Routing(2, scores="sigmoid", bias=bias, num_groups=4, num_chosen_groups=1, group_score="top2")
    ids, _ = route(torch.tensor([[0.0, 0.0, 1.0, 0.5, 9.0, 9.0, 9.0, 9.0]]), routing)
    assert ids.tolist() == [[2, 3]]


def test_a_group_counts_by_its_best_or_by_its_two_best():
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    one = Routing(1, scores="sigmoid", num_groups=2, num_chosen_groups=1)
    assert route(logits, one)[0].tolist() == [[0]]
    two = Routing(1, scores="sigmoid", num_groups=2, num_chosen_groups=1, group_score="top2")
    assert route(logits, two)[0].tolist() == [[2]]


def test_logits_in_bfloat16_count_in_float32():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    weights = route(logits, Routing(2))[1]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, logits.float().softmax(-1)[:, [2, 1]])


@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_output_is_the_weighted_sum_of_the_experts_chosen(activation):
    weights, (x, logits) = made(activation, bias=True), inputs()
    found = ReferenceExperts(weights, Routing(3))(x, logits)
    ids, share = route(logits, Routing(3))
    for token in range(len(x)):
        total = torch.zeros(H)
        for e, s in zip(ids[token].tolist(), share[token], strict=True):
            gate, up = (weights.gate_up[e] @ x[token] + weights.gate_up_bias[e]).split(WIDTH)
            if activation == "silu":
                inner = gate * gate.sigmoid() * up
            else:
                gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
                inner = (up + 1) * gate * (gate * 1.702).sigmoid()
            total += s * (weights.down[e] @ inner + weights.down_bias[e])
        torch.testing.assert_close(found[token], total, atol=1e-5, rtol=1e-5)


def test_clamped_gate_has_no_lower_bound():
    found = activate(torch.tensor([[-20.0, 0.0], [20.0, 20.0], [0.5, -20.0]]), "clamped", 7.0)
    gate, up = torch.tensor([-20.0, 7.0, 0.5]), torch.tensor([0.0, 7.0, -7.0])
    torch.testing.assert_close(found[:, 0], (up + 1) * gate * (1.702 * gate).sigmoid())


def test_all_experts_with_softmax_are_a_dense_mixture():
    weights, (x, logits) = made(), inputs()
    found = ReferenceExperts(weights, Routing(E, normalizes=True))(x, logits)
    every = torch.stack([ReferenceExperts(_only(weights, e), Routing(1))(x, logits[:, :1]) for e in range(E)], 1)
    torch.testing.assert_close(found, (every * logits.softmax(-1)[..., None]).sum(1), atol=1e-5, rtol=1e-5)


def _only(weights, expert):
    return ExpertWeights(weights.gate_up[expert : expert + 1], weights.down[expert : expert + 1])


def test_permuting_experts_together_with_their_logits_changes_nothing():
    weights, (x, logits) = made(), inputs()
    order = torch.randperm(E, generator=torch.Generator().manual_seed(3))
    moved = ExpertWeights(weights.gate_up[order], weights.down[order])
    routing = Routing(3, normalizes=True)
    expected = ReferenceExperts(weights, routing)(x, logits)
    # the softmax sums in another order
    torch.testing.assert_close(ReferenceExperts(moved, routing)(x, logits[:, order]), expected, atol=1e-6, rtol=1e-5)


def test_counts_leave_padding_out_and_go_on_from_step_to_step():
    weights, (x, logits) = made(), inputs(tokens=6)
    experts = ReferenceExperts(weights, Routing(2))
    experts(x, logits, torch.tensor([4], dtype=torch.int32))
    ids = route(logits, Routing(2))[0]
    expected = torch.bincount(ids[:4].flatten(), minlength=E)
    assert torch.equal(experts.counts, expected) and experts.counts.dtype == torch.int64
    experts(x, logits)
    assert torch.equal(experts.counts, expected + torch.bincount(ids.flatten(), minlength=E))


def test_counts_are_by_id_whatever_the_order_of_choice():
    counts = torch.zeros(4, dtype=torch.int64)
    count_tokens(counts, torch.tensor([[3, 1], [1, 0], [2, 3]]), torch.tensor([2]))
    assert counts.tolist() == [1, 2, 0, 1]


def test_no_tokens_give_no_rows():
    assert ReferenceExperts(made(), Routing(2))(torch.empty(0, H), torch.empty(0, E)).shape == (0, H)


def test_sum_counts_in_float32_in_the_order_of_choice():
    outputs = torch.tensor([[[256.0], [1.0], [-256.0]]], dtype=torch.bfloat16)  # 257 is no bfloat16
    assert combine(outputs, torch.ones(1, 3), torch.bfloat16).item() == 1.0
