"""The sparse block: a router in float32, experts that all tokens use, counts by name, and how experts are read."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from framework.errors import CheckpointError, ConfigError
from framework.interfaces import ExpertWeights, ModelContext, Routing
from framework.layers import ops
from framework.layers.experts import ReferenceExperts
from framework.layers.moe import SharedExperts, SparseMLP, load_experts
from framework_loaders.source import ShapedSource

E, H, WIDTH = 4, 8, 6


class Source(ShapedSource):
    """Tensors of a test, in the dtype that is asked for."""

    def __init__(self, dtype=torch.float32, **tensors):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        super().__init__("file", shapes, dtype, torch.device("cpu"))
        self._tensors = tensors

    def _read(self, name, dtype):
        return self._tensors[name].to(dtype)


class Sums:
    """A norm that only adds: what enters the block is what a test gives."""

    fusable = None

    def add(self, x, residual):
        total = x if residual is None else x + residual
        return total.clone(), total


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def context(source, dtype=torch.float32):
    backend = SimpleNamespace(
        pack_linear=lambda weight, bias=None: lambda x: functional.linear(x, weight, bias),
        pack_experts=ReferenceExperts,
        layer_ops=ops,
    )
    return ModelContext(backend, source, dtype, torch.device("cpu"), 16)


def experts(dtype=torch.float32):
    return ExpertWeights(random(E, 2 * WIDTH, H, seed=1).to(dtype), random(E, H, WIDTH, seed=2).to(dtype))


def test_block_is_that_of_the_normalised_sum_and_gives_the_stream_back():
    router, x, residual = random(E, H, seed=3), random(5, H, seed=4), random(5, H, seed=5)
    ctx = context(Source(**{"b.gate.weight": router}))
    block = SparseMLP(ctx, "b", experts(), Routing(2))
    out, stream = block(x.clone(), residual.clone(), Sums())
    total = x + residual
    torch.testing.assert_close(out, ReferenceExperts(experts(), Routing(2))(total, total @ router.T))
    torch.testing.assert_close(stream, total)
    alone, stream = block(total.clone(), None, Sums())
    torch.testing.assert_close((alone, stream), (out, total))


def test_router_tells_apart_what_bfloat16_would_not():
    router = torch.ones(E, H)
    router[2, 0] += 2**-12  # 1 in bfloat16
    ctx = context(Source(torch.bfloat16, **{"b.gate.weight": router}), torch.bfloat16)
    block = SparseMLP(ctx, "b", experts(torch.bfloat16), Routing(1))
    out, _ = block(torch.ones(3, H, dtype=torch.bfloat16), None, Sums())
    assert out.dtype == torch.bfloat16
    assert ctx.experts["b"].counts.tolist() == [0, 0, 3, 0]


def test_bias_of_the_router_joins_its_logits():
    names = {"b.router.weight": torch.zeros(E, H), "b.router.bias": torch.tensor([0.0, 1.0, 3.0, 2.0])}
    ctx = context(Source(**names))
    block = SparseMLP(ctx, "b", experts(), Routing(2, scores="selected"), router="router", router_bias=True)
    block(random(6, H), None, Sums())
    assert ctx.experts["b"].counts.tolist() == [0, 0, 6, 6]


def test_padding_is_left_out_of_the_counts():
    ctx = context(Source(**{"b.gate.weight": random(E, H)}))
    SparseMLP(ctx, "b", experts(), Routing(2))(random(6, H), None, Sums(), torch.tensor([4]))
    assert ctx.experts["b"].counts.sum() == 2 * 4


@pytest.mark.parametrize("gate", [None, "b.shared_expert_gate"])
def test_experts_of_all_tokens_are_added_and_gated_where_a_family_has_a_gate(gate):
    names = {f"b.shared.{name}_proj.weight": random(10, H, seed=7 + i) for i, name in enumerate(("gate", "up"))}
    names |= {"b.shared.down_proj.weight": random(H, 10, seed=9), "b.gate.weight": random(E, H, seed=3)}
    if gate is not None:
        names[f"{gate}.weight"] = random(1, H, seed=11)
    ctx = context(Source(**names))
    shared = SharedExperts(ctx, "b.shared", H, 10, gate)
    x = random(5, H, seed=4)
    out, _ = SparseMLP(ctx, "b", experts(), Routing(2), shared=shared)(x.clone(), None, Sums())
    inner = functional.silu(x @ names["b.shared.gate_proj.weight"].T) * (x @ names["b.shared.up_proj.weight"].T)
    expected = inner @ names["b.shared.down_proj.weight"].T
    if gate is not None:
        expected = expected * torch.sigmoid(x @ names[f"{gate}.weight"].T)
    routed = ReferenceExperts(experts(), Routing(2))(x, x @ names["b.gate.weight"].T)
    torch.testing.assert_close(out, routed + expected, atol=1e-5, rtol=1e-5)
    assert ctx.weights.unused() == []


def test_experts_are_read_one_by_one_or_fused_with_gates_first():
    single = {
        f"e.{expert}.{name}.weight": random(*shape, seed=10 * expert + i)
        for expert in range(E)
        for i, (name, shape) in enumerate({"w1": (WIDTH, H), "w2": (H, WIDTH), "w3": (WIDTH, H)}.items())
    }
    source = Source(**single)
    found = load_experts(context(source), "e", E, H, WIDTH, ("w1", "w3", "w2"))
    assert source.unused() == []
    for expert in range(E):
        gate, down, up = (single[f"e.{expert}.{name}.weight"] for name in ("w1", "w2", "w3"))
        assert torch.equal(found.gate_up[expert], torch.cat((gate, up))) and torch.equal(found.down[expert], down)
    fused = Source(**{"e.gate_up_proj": found.gate_up, "e.down_proj": found.down})
    again = load_experts(context(fused), "e", E, H, WIDTH)
    assert torch.equal(again.gate_up, found.gate_up) and torch.equal(again.down, found.down)


def test_an_expert_of_another_shape_is_named():
    with pytest.raises(CheckpointError, match=r"'e.gate_up_proj' has shape \[4, 8, 12\], .* asks for \[4, 12, 8\]"):
        load_experts(context(Source(**{"e.gate_up_proj": random(E, H, 2 * WIDTH)})), "e", E, H, WIDTH)


class Gating:
    """A product that takes the gate behind it, as `interfaces.Gates` says, and is never asked for anything else."""

    def __init__(self, weight, bias=None):
        self.weight, self.bias = weight, bias

    def gated(self, x):
        return ops.silu_and_mul(functional.linear(x, self.weight, self.bias))


def test_gate_of_shared_experts_is_taken_into_the_launch_of_a_product_that_offers_it():
    source = {"s.gate_proj.weight": random(6, H, seed=1), "s.up_proj.weight": random(6, H, seed=2)}
    source["s.down_proj.weight"] = random(H, 6, seed=3)
    plain, fusing = context(Source(**source)), context(Source(**source))
    fusing.backend.pack_linear = lambda weight, bias=None: (
        Gating(weight, bias) if len(weight) == 12 else plain.backend.pack_linear(weight, bias)
    )
    x = random(5, H, seed=4)
    torch.testing.assert_close(SharedExperts(fusing, "s", H, 6)(x), SharedExperts(plain, "s", H, 6)(x))


class Beside(ReferenceExperts):
    """A mixture that adds another block's output, as `interfaces.AddsBeside` says."""

    def beside(self, other, x, logits, num_tokens=None):
        return other + super().__call__(x, logits, num_tokens)

    def __call__(self, *args):
        raise AssertionError("asked for the experts alone")


def test_output_of_shared_experts_is_added_by_a_mixture_that_offers_it():
    source = {"b.gate.weight": random(E, H, seed=3), "s.gate_proj.weight": random(6, H, seed=1)}
    source |= {"s.up_proj.weight": random(6, H, seed=2), "s.down_proj.weight": random(H, 6, seed=3)}
    outs = []
    for kind in (ReferenceExperts, Beside):
        ctx = context(Source(**source))
        ctx.backend.pack_experts = kind
        block = SparseMLP(ctx, "b", experts(), Routing(2), shared=SharedExperts(ctx, "s", H, 6))
        outs.append(block(random(5, H, seed=4), None, Sums())[0])
    torch.testing.assert_close(outs[1], outs[0])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"k": 0}, r"Routing.k=0 must be at least 1"),
        ({"scores": "sofmax"}, r"Routing.scores='sofmax' must be softmax, sigmoid or selected"),
        ({"group_score": "top3"}, r"Routing.group_score='top3' must be max or top2"),
        ({"num_groups": 0}, r"Routing.num_chosen_groups=1 must be at least 1, and at most num_groups=0"),
        ({"num_groups": 2, "num_chosen_groups": 3}, r"Routing.num_chosen_groups=3 must .* at most num_groups=2"),
        ({"num_groups": 2, "num_chosen_groups": 0}, r"Routing.num_chosen_groups=0 must be at least 1"),
    ],
)
def test_a_routing_that_fits_no_mixture_is_refused_where_it_is_made(words, told):
    with pytest.raises(ConfigError, match=told):
        Routing(**{"k": 1, **words})


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        (Routing(5), r"Routing.k=5: 1 of 1 groups of 4 experts hold 4\. Choose a smaller k"),
        (Routing(3, num_groups=2), r"Routing.k=3: 1 of 2 groups of 2 experts hold 2\. .* or more groups"),
        (Routing(1, num_groups=3, num_chosen_groups=2), r"num_groups=3 does not divide 4 experts, .* divisor of 4"),
        (Routing(1, num_groups=5), r"num_groups=5 does not divide 4 experts"),
        (Routing(1, num_groups=4, group_score="top2"), r"'top2' adds up .* 4 groups of 4 experts have one each"),
        (Routing(1, bias=torch.zeros(3)), r"Routing.bias has the shape \(3,\), and there are 4 experts"),
    ],
)
def test_a_routing_that_does_not_fit_the_experts_is_refused_before_they_are_packed(routing, told):
    ctx = context(Source(**{"b.gate.weight": random(E, H)}))
    ctx.backend.pack_experts = None
    with pytest.raises(ConfigError, match=told):
        SparseMLP(ctx, "b", experts(), routing)


def test_a_routing_that_just_fits_is_taken():
    for routing in (Routing(4), Routing(2, num_groups=2, group_score="top2"), Routing(1, num_groups=4)):
        routing.check(E)
    Routing(4, num_groups=4, num_chosen_groups=4, group_score="top2").check(E)  # no group is left out
