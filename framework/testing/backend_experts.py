"""The part of the backends' contract suite that is about mixtures of experts: `Backend.pack_experts` against the torch
reference, with every way of routing, padding and any company of a token. Called by `testing.backends`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from framework.interfaces import ExpertWeights, Routing
from framework.layers.experts import ReferenceExperts
from framework.testing.checking import Skipped

if TYPE_CHECKING:
    from framework.interfaces import Backend
    from framework.testing.backend_case import BackendCase

E, H, WIDTH, K = 12, 32, 48, 3
GROUPS: dict[str, Any] = {"num_groups": 4, "num_chosen_groups": 2}
ROUTINGS = {
    "softmax": Routing(K),
    "softmax, normalised": Routing(K, normalizes=True),
    "selected": Routing(K, scores="selected"),
    "sigmoid": Routing(K, scores="sigmoid", scale=2.5),
    "one expert": Routing(1),
    "every expert": Routing(E, normalizes=True),
    "groups by their best": Routing(K, scale=2.5, **GROUPS),
    "groups by their two best, biased": Routing(
        K, scores="sigmoid", normalizes=True, scale=2.5, bias=torch.linspace(-0.8, 0.2, E), group_score="top2", **GROUPS
    ),
}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weights(activation: Any) -> ExpertWeights:
    """On the host; with biases where the activation is the one that models with biases have."""
    has_bias = activation == "clamped"
    return ExpertWeights(
        _random(E, 2 * WIDTH, H, seed=1) * H**-0.5,
        _random(E, H, WIDTH, seed=2) * WIDTH**-0.5,
        _random(E, 2 * WIDTH, seed=3) if has_bias else None,
        _random(E, H, seed=4) if has_bias else None,
        activation,
        limit=1.0,
    )


def _pack(backend: Backend, weights: ExpertWeights, routing: Routing) -> Any:
    device = backend.device
    moved: dict[str, Any] = {
        name: value.to(device, copy=True) for name, value in vars(weights).items() if isinstance(value, Tensor)
    }
    if routing.bias is not None:
        routing = replace(routing, bias=routing.bias.to(device))
    return backend.pack_experts(replace(weights, **moved), routing)


def _inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    """x [T, H] and router logits [T, E], no two of which are near each other."""
    return _random(num_tokens, H, seed=num_tokens), _random(num_tokens, E, seed=num_tokens + 1)


def check_experts(case: BackendCase) -> None:
    """Outputs and counts equal `framework.layers.experts` for any number of tokens, up to rounding."""
    backend = case.build()
    for activation in ("silu", "clamped"):
        weights = _weights(activation)
        for name, routing in ROUTINGS.items():
            packed, reference = _pack(backend, weights, routing), ReferenceExperts(weights, routing)
            for num_tokens in (1, 2, 9, 70):
                x, logits = _inputs(num_tokens)
                found = packed(x.to(backend.device), logits.to(backend.device)).cpu()
                off = float((found - reference(x, logits)).abs().max())
                assert off < 1e-3, f"{case.name}: experts by {name} ({activation}) are off by {off:.3g}"
            counts = packed.counts.cpu()
            assert torch.equal(counts, reference.counts), (
                f"{case.name}: experts by {name} count {counts.tolist()} tokens, {reference.counts.tolist()} is right"
            )


def check_equal_scores_choose_the_lower_expert(case: BackendCase) -> None:
    """Of a tie: the first k experts, in their order."""
    backend = case.build()
    packed = _pack(backend, _weights("silu"), ROUTINGS["softmax"])
    x = _inputs(5)[0]
    packed(x.to(backend.device), torch.zeros(5, E, device=backend.device))
    wanted = [5] * K + [0] * (E - K)
    assert packed.counts.tolist() == wanted, f"{case.name}: of equal scores it chooses {packed.counts.tolist()}"


def check_padding_is_not_counted(case: BackendCase) -> None:
    """Tokens from num_tokens on: they are in no count, and what comes out for them is finite."""
    backend = case.build()
    weights, routing, device = _weights("silu"), ROUTINGS["softmax"], backend.device
    packed, reference = _pack(backend, weights, routing), ReferenceExperts(weights, routing)
    x, logits = _inputs(9)
    out = packed(x.to(device), logits.to(device), torch.tensor([4], dtype=torch.int32, device=device))
    off = float((out[:4].cpu() - reference(x[:4], logits[:4])).abs().max())
    assert off < 1e-3, f"{case.name}: tokens before the padding are off by {off:.3g}"
    assert bool(out.isfinite().all()), f"{case.name}: what comes out for padding is not finite"
    assert torch.equal(packed.counts.cpu(), reference.counts), f"{case.name}: padding is counted"


def check_experts_of_any_batch_are_equal(case: BackendCase) -> None:
    """What `batch_invariant` means: a token's output has the same bits whatever stands beside it."""
    if "batch_invariant" not in case.build().caps.keeps:
        raise Skipped("it does not offer batch_invariant")
    backend = case.build(batch_invariant=True)
    packed = _pack(backend, _weights("clamped"), ROUTINGS["groups by their two best, biased"])
    x, logits = (part.to(backend.device) for part in _inputs(70))
    together = packed(x, logits)
    for first, last in ((0, 1), (3, 5), (8, 33), (1, 70)):
        alone = packed(x[first:last].contiguous(), logits[first:last].contiguous())
        assert torch.equal(alone, together[first:last]), (
            f"{case.name}: tokens {first} to {last} have other bits in a batch of their own"
        )


CHECKS = (
    check_experts,
    check_equal_scores_choose_the_lower_expert,
    check_padding_is_not_counted,
    check_experts_of_any_batch_are_equal,
)
