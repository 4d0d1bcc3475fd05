"""The part of the backends' contract suite that is about mixtures of experts: `Backend.pack_experts` against the torch
reference, with every way of routing, padding, any company of a token, and what may be added beside. Called by
`testing.backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from framework.interfaces import AddsBeside, ExpertWeights, Routing
from framework.layers.experts import ReferenceExperts
from framework.testing.checking import Skipped
from framework.testing.tolerance import assert_near

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
BIASED = ROUTINGS["groups by their two best, biased"]
FLOAT32 = 1e-3
"""How far outputs may be off in float32: sums in another order."""


def _random(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weights(dtype: torch.dtype, activation: Any) -> ExpertWeights:
    """On the host; with biases where the activation is the one that models with biases have."""
    has_bias = activation == "clamped"
    return ExpertWeights(
        _random(dtype, E, 2 * WIDTH, H, seed=1) * H**-0.5,
        _random(dtype, E, H, WIDTH, seed=2) * WIDTH**-0.5,
        _random(dtype, E, 2 * WIDTH, seed=3) if has_bias else None,
        _random(dtype, E, H, seed=4) if has_bias else None,
        activation,
        limit=1.0,
    )


class _OfHost:
    """A backend's experts for tensors on the host. adds: whether they add beside; counts are the backend's own."""

    def __init__(self, backend: Backend, routing: Routing, activation: Any) -> None:
        weights, self._device = _weights(backend.dtype, activation), backend.device
        moved: dict[str, Any] = {
            name: value.to(self._device, copy=True)
            for name, value in vars(weights).items()
            if isinstance(value, Tensor)
        }
        if routing.bias is not None:
            routing = replace(routing, bias=routing.bias.to(self._device))
        self._packed: Any = backend.pack_experts(replace(weights, **moved), routing)
        self.adds = isinstance(self._packed, AddsBeside)

    @property
    def counts(self) -> Tensor:
        counts: Tensor = self._packed.counts
        return counts

    def __call__(self, x: Tensor, logits: Tensor, num_tokens: int | None = None) -> Tensor:
        """As `interfaces.Experts`."""
        out: Tensor = self._packed(*self._moved(x, logits), self._first(num_tokens))
        return out.cpu()

    def beside(self, other: Tensor, x: Tensor, logits: Tensor, num_tokens: int | None = None) -> Tensor:
        """As `interfaces.AddsBeside`."""
        out: Tensor = self._packed.beside(*self._moved(other, x, logits), self._first(num_tokens))
        return out.cpu()

    def _moved(self, *tensors: Tensor) -> list[Tensor]:
        return [one.to(self._device, copy=True) for one in tensors]

    def _first(self, num_tokens: int | None) -> Tensor | None:
        return None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32, device=self._device)


def _pair(backend: Backend, routing: Routing, activation: Any = "silu") -> tuple[_OfHost, ReferenceExperts]:
    """(experts of the backend, the reference), each with weights of its own."""
    return _OfHost(backend, routing, activation), ReferenceExperts(_weights(backend.dtype, activation), routing)


def _inputs(dtype: torch.dtype, num_tokens: int) -> tuple[Tensor, Tensor]:
    """x [T, H], and router logits [T, E] float32, no two of which are near each other; on the host."""
    x = _random(dtype, num_tokens, H, seed=num_tokens)
    return x, _random(torch.float32, num_tokens, E, seed=num_tokens + 1)


def _assert_counts(packed: _OfHost, reference: ReferenceExperts, what: str) -> None:
    found, wanted = packed.counts.tolist(), reference.counts.tolist()
    assert found == wanted, f"{what} count {found} tokens, {wanted} is right"


def check_experts(case: BackendCase) -> None:
    """Outputs and counts equal `framework.layers.experts` for any number of tokens, up to rounding."""
    _check_experts(case, case.build())


def check_experts_in_16_bits(case: BackendCase) -> None:
    """The same; experts are chosen by router logits that stay float32."""
    for backend in case.of_16_bits():
        _check_experts(case, backend)
        packed, _ = _pair(backend, ROUTINGS["softmax"])
        logits = 3 + 1e-5 * torch.arange(E).float()  # rising, and of 16 bits all are equal
        packed(_inputs(backend.dtype, 1)[0], logits[None])
        found, wanted = packed.counts.nonzero().flatten().tolist(), list(range(E - K, E))
        assert found == wanted, f"{case.name}: chooses experts {found} by logits of 16 bits, {wanted} are the best"


def _check_experts(case: BackendCase, backend: Backend) -> None:
    for activation in ("silu", "clamped"):
        for name, routing in ROUTINGS.items():
            packed, reference = _pair(backend, routing, activation)
            for num_tokens in (1, 2, 9, 70):
                x, logits = _inputs(backend.dtype, num_tokens)
                what = f"{case.name}: experts by {name} ({activation})"
                assert_near(packed(x, logits), reference(x, logits), backend.dtype, what, FLOAT32)
            _assert_counts(packed, reference, f"{case.name}: experts by {name}")


def check_equal_scores_choose_the_lower_expert(case: BackendCase) -> None:
    """Of a tie: the first k experts, in their order."""
    backend = case.build()
    packed, _ = _pair(backend, ROUTINGS["softmax"])
    packed(_inputs(backend.dtype, 5)[0], torch.zeros(5, E))
    wanted = [5] * K + [0] * (E - K)
    assert packed.counts.tolist() == wanted, f"{case.name}: of equal scores it chooses {packed.counts.tolist()}"


def check_logits_that_are_no_numbers_harm_nobody_else(case: BackendCase) -> None:
    """A token whose router logits are not finite gets k experts, each once; all others get what they get without it."""
    backend = case.build()
    strange = {2: torch.nan, 5: torch.inf, 7: -torch.inf}
    usual = [token for token in range(9) if token not in strange]
    for name, routing in ROUTINGS.items():
        packed, reference = _pair(backend, routing)
        x, logits = _inputs(backend.dtype, 9)
        wanted = reference(x[usual], logits[usual])
        for token, value in strange.items():
            logits[token] = value
        logits[2, 1:] = 0.0  # one of many is enough
        what = f"{case.name}: experts by {name} beside logits that are not finite"
        assert_near(packed(x, logits)[usual], wanted, backend.dtype, what, FLOAT32)
        _assert_each_once(packed.counts.cpu() - reference.counts, len(strange), routing.k, what)
        for token, value in strange.items():
            packed.counts.zero_()
            packed(x[token : token + 1], logits[token : token + 1])
            _assert_each_once(packed.counts.cpu(), 1, routing.k, f"{case.name}: experts by {name} of logits {value}")


def _assert_each_once(counts: Tensor, num_tokens: int, k: int, what: str) -> None:
    assert int(counts.sum()) == num_tokens * k and int(counts.max()) <= num_tokens, (
        f"{what}: {num_tokens} tokens of {k} different experts each are counted as {counts.tolist()}"
    )


def check_padding_is_not_counted(case: BackendCase) -> None:
    """Tokens from num_tokens on: they are in no count, and what comes out for them is finite."""
    backend = case.build()
    packed, reference = _pair(backend, ROUTINGS["softmax"])
    x, logits = _inputs(backend.dtype, 9)
    out = packed(x, logits, 4)
    wanted, what = reference(x[:4], logits[:4]), f"{case.name}: tokens before the padding"
    assert_near(out[:4], wanted, backend.dtype, what, FLOAT32)
    assert bool(out.isfinite().all()), f"{case.name}: what comes out for padding is not finite"
    _assert_counts(packed, reference, f"{case.name}: padding is counted: experts")


def check_counts_add_up_over_calls(case: BackendCase) -> None:
    """Of any number of tokens and without padding, in the one tensor [E] int64 that an engine sets to 0."""
    backend = case.build()
    packed, reference = _pair(backend, BIASED)
    told = (packed.counts.dtype, tuple(packed.counts.shape), packed.counts.device)
    assert told == (torch.int64, (E,), backend.device), f"{case.name}: counts are {told}"
    for before in ("at first", "behind other calls", "once they were set to 0"):
        for num_tokens, real in ((70, 33), (1, None), (9, 4), (2, None)):
            x, logits = _inputs(backend.dtype, num_tokens)
            packed(x, logits, real)
            reference(x[:real], logits[:real])
        _assert_counts(packed, reference, f"{case.name}: calls {before}")
        if before == "behind other calls":
            for counts in (packed.counts, reference.counts):
                counts.zero_()


def check_another_output_is_added_beside(case: BackendCase) -> None:
    """`AddsBeside`: the sum of both, and padding as it is without."""
    _skip_unless_it_adds(case)
    for backend in case.of_any_dtype():
        for name in ("softmax", "groups by their two best, biased"):
            packed, reference = _pair(backend, ROUTINGS[name], "clamped")
            for num_tokens, real in ((1, None), (9, 4), (70, 33)):
                x, logits = _inputs(backend.dtype, num_tokens)
                other = _random(backend.dtype, num_tokens, H, seed=8)
                out = packed.beside(other, x, logits, real)
                wanted = reference(x[:real], logits[:real]).float() + other[:real].float()
                what = f"{case.name}: another output and that of experts by {name}"
                assert_near(out[:real], wanted, backend.dtype, what, FLOAT32)
                assert bool(out.isfinite().all()), f"{case.name}: what comes out beside padding is not finite"
            _assert_counts(packed, reference, f"{case.name}: beside another output, experts")


def check_the_sum_beside_is_rounded_once(case: BackendCase) -> None:
    """What rounding has taken from the experts' output is left when that is added to its negative."""
    _skip_unless_it_adds(case)
    for backend in case.of_16_bits():
        packed, _ = _pair(backend, ROUTINGS["softmax"])
        for num_tokens in (1, 9, 70):
            x, logits = _inputs(backend.dtype, num_tokens)
            left = packed.beside(-packed(x, logits), x, logits)
            assert bool(left.any()), f"{case.name}: the sum beside {num_tokens} tokens is rounded twice"


def _skip_unless_it_adds(case: BackendCase) -> None:
    if not _pair(case.build(), ROUTINGS["softmax"])[0].adds:
        raise Skipped("its experts do not add beside")


def check_experts_of_any_batch_are_equal(case: BackendCase) -> None:
    """What `batch_invariant` means: a token's output has the same bits whatever stands beside it."""
    if "batch_invariant" not in case.build().caps.keeps:
        raise Skipped("it does not offer batch_invariant")
    for backend in case.of_any_dtype(batch_invariant=True):
        packed, _ = _pair(backend, BIASED, "clamped")
        x, logits = _inputs(backend.dtype, 70)
        for how, call in _ways(packed).items():
            together = call(x, logits)
            for first, last in ((0, 1), (3, 5), (8, 33), (1, 70)):
                alone = call(x[first:last], logits[first:last])
                assert torch.equal(alone, together[first:last]), (
                    f"{case.name}: tokens {first} to {last} have other bits in a batch of their own{how}, in "
                    f"{backend.dtype}"
                )


def _ways(packed: _OfHost) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The experts alone, and beside their own input where they add that."""
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"": packed}
    if packed.adds:
        ways[" beside another output"] = lambda x, logits: packed.beside(x, x, logits)
    return ways


CHECKS = (
    check_experts,
    check_experts_in_16_bits,
    check_equal_scores_choose_the_lower_expert,
    check_logits_that_are_no_numbers_harm_nobody_else,
    check_padding_is_not_counted,
    check_counts_add_up_over_calls,
    check_another_output_is_added_beside,
    check_the_sum_beside_is_rounded_once,
    check_experts_of_any_batch_are_equal,
)
