"""Mixtures of experts in Triton against `framework.layers.experts`: routing, counts, products of few and of many."""

from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch

from framework.errors import ConfigError
from framework.interfaces import ExpertWeights, Routing
from framework.layers.experts import ReferenceExperts, route
from framework_backends.cuda_device import ProgramMemory
from framework_backends.cuda_experts import (
    ANY,
    CudaExperts,
    CudaExpertsPacker,
    ExpertTiles,
    Grouped,
    GroupTiles,
    Rows,
    choose_expert_tiles,
    most_tiles,
    tile_bytes,
)
from framework_backends.cuda_linear import RowTiles
from framework_backends.triton.experts_route import Chosen

from .comparing import DTYPES, normal, within

# Sums in float32, rounded behind each product; the reference adds in another order. The interpreter cuts bfloat16 off
# where devices round it, an error of one unit, 2^-7, each time.
close = within({torch.float32: 3e-5, torch.bfloat16: 6e-2, torch.float16: 5e-3})

TALL = GroupTiles(16, 32, 32, width=2, stages=2, warps=4, is_tall=True)
FLAT = GroupTiles(32, 64, 16, width=8, stages=2, warps=4, is_tall=False, halves=True)
NARROW = GroupTiles(32, 16, 64, width=1, stages=3, warps=4, is_tall=False)
JOINED = replace(FLAT, pairs=16, joined=True)
SMALL = {
    "rows, then tall": ExpertTiles(
        (Rows(1, RowTiles(16, 32, 1, ahead=1), RowTiles(32, 32, 1, ahead=1, in_turn=False)),
         Rows(4, RowTiles(32, 32, 1, ahead=2), RowTiles(16, 32, 1, ahead=2))),
        (Grouped(ANY, TALL, TALL),),
    ),
    "tall, then flat": ExpertTiles((), (Grouped(2, TALL, TALL), Grouped(ANY, FLAT, FLAT))),
    "narrow": ExpertTiles((), (Grouped(ANY, NARROW, NARROW),)),
    "joined": ExpertTiles((), (Grouped(ANY, JOINED, FLAT),)),
}  # fmt: skip
ROWS = SMALL["rows, then tall"]
PLAIN = SMALL["narrow"]
ROUTINGS = {
    "mixtral": Routing(2, normalizes=True),
    "qwen": Routing(3),
    "deepseek-v2": Routing(3, scale=16.0, num_groups=3, num_chosen_groups=2),
    "deepseek-v3": Routing(
        3, "sigmoid", normalizes=True, scale=2.5, bias=torch.linspace(-1, 1, 12), num_groups=4, num_chosen_groups=2,
        group_score="top2",
    ),
    "gpt-oss": Routing(3, "selected"),
    "one": Routing(1, "sigmoid"),
    "all": Routing(12, normalizes=True),
}  # fmt: skip


def mixture(device, dtype=torch.float32, experts=6, size=48, width=32, bias=False, **words):
    """Experts whose outputs are of the size of 1."""

    def made(*shape, scale, seed):
        return normal(shape, torch.float32, device, seed=seed).mul(scale).to(dtype)

    biases = (None, None)
    if bias:
        biases = made(experts, 2 * width, scale=0.5, seed=12), made(experts, size, scale=0.5, seed=13)
    return ExpertWeights(
        made(experts, 2 * width, size, scale=size**-0.5, seed=10),
        made(experts, size, width, scale=1.5 * width**-0.5, seed=11),
        *biases,
        **words,
    )


def inputs(device, tokens, dtype=torch.float32, experts=6, size=48, seed=1):
    x = normal((tokens, size + 16), dtype, device, seed=seed)[:, :size]
    return x, normal((tokens, experts), torch.float32, device, seed=seed + 1)


def on(routing, device):
    return replace(routing, bias=None if routing.bias is None else routing.bias.to(device))


def ours(weights, routing, tiles=PLAIN):
    return CudaExperts(weights, routing, tiles, dependent=weights.down.is_cuda)


@pytest.mark.parametrize("num_tokens", [2, 21])
@pytest.mark.parametrize("tiles", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixture_equals_the_reference(device, dtype, tiles, num_tokens):
    if dtype == torch.float32:
        tiles = replace(tiles, rows=())  # they are for 16 bits
    weights, (x, logits) = mixture(device, dtype), inputs(device, num_tokens, dtype)
    expected, actual = ReferenceExperts(weights, ROUTINGS["mixtral"]), ours(weights, ROUTINGS["mixtral"], tiles)
    close(actual(x, logits), expected(x, logits))
    assert torch.equal(actual.counts, expected.counts)


@pytest.mark.parametrize("tiles", [ROWS, PLAIN], ids=["rows", "grouped"])
def test_biases_and_the_clamped_activation_equal_the_reference(device, tiles):
    weights = mixture(device, torch.float16, bias=True, activation="clamped", limit=0.7)
    x, logits = inputs(device, 4, torch.float16)
    close(ours(weights, Routing(2), tiles)(x, logits), ReferenceExperts(weights, Routing(2))(x, logits))


def test_sizes_that_are_no_whole_vectors_equal_the_reference_for_few_tokens(device):
    weights, (x, logits) = mixture(device, torch.float16, width=37), inputs(device, 3, torch.float16)
    close(ours(weights, Routing(2), ROWS)(x, logits), ReferenceExperts(weights, Routing(2))(x, logits))


@pytest.mark.parametrize("tiles", [ROWS, PLAIN], ids=["rows", "grouped"])
def test_another_output_is_added_to_the_sum_and_keeps_its_values(device, tiles):
    weights, (x, logits) = mixture(device, torch.float16), inputs(device, 4, torch.float16)
    other, actual = normal((4, 48), torch.float16, device, seed=9), ours(weights, Routing(2), tiles)
    before, real = other.clone(), torch.tensor([3], dtype=torch.int32, device=device)
    expected = ReferenceExperts(weights, Routing(2))(x, logits) + other
    close(actual.beside(other, x, logits), expected)
    close(actual.beside(other, x, logits, real)[:3], expected[:3])
    assert torch.equal(other, before) and actual.counts.sum() == (4 + 3) * 2


@pytest.mark.parametrize("num_tokens", [1, 18])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_weights_and_counts_equal_the_reference(device, name, num_tokens):
    routing = on(ROUTINGS[name], device)
    weights, (_, logits) = mixture(device, experts=12, size=16, width=16), inputs(device, num_tokens, experts=12)
    ids, expected = route(logits, routing)
    for sorts in (False, True):
        chosen, by_expert, counts = routed(weights, routing, logits, sorts)
        torch.testing.assert_close(chosen.weights, expected, atol=1e-6, rtol=2e-6)  # exp differs in its last bits
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=12))
        assert torch.equal(ids_by_expert(by_expert, routing.k) if sorts else chosen.ids.long(), ids)


def routed(weights, routing, logits, sorts, num_tokens=None):
    experts = ours(weights, routing)
    if sorts:
        found, by_expert = experts._sorted(logits, num_tokens, 16, experts._words(logits))
        return Chosen(None, found), by_expert, experts.counts
    shape = len(logits), routing.k
    chosen = Chosen(logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape))
    experts._choose(logits, chosen, None, num_tokens, rows=1, warps=1, pairs=1, words=experts._words(logits))
    return chosen, None, experts.counts


def ids_by_expert(by_expert, k):
    """[T, k] of what stands in the tiles, -1 for what does not; every pair stands once, and tiles follow each other."""
    ids = torch.full((by_expert.pairs.shape[1] * k,), -1)
    place = 0
    for expert, begin, count, at in by_expert.tiles[: int(by_expert.count)].tolist():
        assert at == place and 0 < count <= 16 and begin % 16 == 0
        pairs = by_expert.pairs[expert, begin : begin + count].cpu().long()
        assert (ids[pairs] == -1).all()
        ids[pairs] = expert
        place += count
    return ids.view(-1, k).to(by_expert.pairs.device)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "selected"])
def test_of_equal_scores_the_lower_id_goes_first(device, scores):
    logits = torch.zeros(3, 12, device=device)
    logits[1, 5:9] = 1
    for sorts in (False, True):
        chosen, by_expert, _ = routed(mixture(device, experts=12), Routing(3, scores), logits, sorts)
        ids = ids_by_expert(by_expert, 3) if sorts else chosen.ids
        assert ids.tolist() == [[0, 1, 2], [5, 6, 7], [0, 1, 2]]


def test_logits_that_are_no_numbers_choose_each_expert_once(device):
    logits = torch.full((2, 12), float("nan"), device=device)
    logits[1] = float("-inf")
    chosen, _, counts = routed(mixture(device, experts=12), Routing(3, "selected"), logits, sorts=False)
    assert chosen.ids.tolist() == [[0, 1, 2]] * 2
    assert counts.tolist() == [2, 2, 2] + [0] * 9


@pytest.mark.parametrize("num_experts", [1, 12, 160, 256])
def test_experts_of_any_number_are_chosen_from(device, num_experts):
    logits, routing = normal((9, num_experts), torch.float32, device), Routing(min(6, num_experts))
    found, by_expert, counts = routed(mixture(device, experts=num_experts, size=16, width=16), routing, logits, True)
    ids, expected = route(logits, routing)
    assert torch.equal(ids_by_expert(by_expert, routing.k), ids)
    torch.testing.assert_close(found.weights, expected, atol=1e-6, rtol=2e-6)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=num_experts))


@pytest.mark.parametrize("tiles", [ROWS, PLAIN], ids=["rows", "grouped"])
def test_padding_is_not_counted_and_comes_out_as_0(device, tiles):
    weights, (x, logits) = mixture(device, torch.float16), inputs(device, 4, torch.float16)
    num_tokens = torch.tensor([3], dtype=torch.int32, device=device)
    expected, actual = ReferenceExperts(weights, Routing(2)), ours(weights, Routing(2), tiles)
    want = expected(x[:3], logits[:3])
    x[3], logits[3] = float("nan"), float("inf")
    got = actual(x, logits, num_tokens)
    close(got[:3], want)
    assert (got[3] == 0).all()
    assert torch.equal(actual.counts, expected.counts)


def test_counts_add_up_over_calls_and_nothing_else_is_kept(device):
    weights, actual = mixture(device), ours(mixture(device), Routing(2))
    expected = ReferenceExperts(weights, Routing(2))
    for tokens, seed in ((17, 1), (3, 5), (20, 9)):
        x, logits = inputs(device, tokens, seed=seed)
        close(actual(x, logits), expected(x, logits))
    assert torch.equal(actual.counts, expected.counts)
    assert actual.counts.dtype == torch.int64


def test_one_expert_may_get_every_token(device):
    weights, (x, logits) = mixture(device), inputs(device, 50)
    logits[:, 4] += 100
    expected, actual = ReferenceExperts(weights, Routing(1)), ours(weights, Routing(1))
    close(actual(x, logits), expected(x, logits))
    assert actual.counts[4] == 50


def test_every_expert_may_get_every_token(device):
    weights, (x, logits) = mixture(device), inputs(device, 5)
    routing = Routing(6, normalizes=True)
    close(ours(weights, routing)(x, logits), ReferenceExperts(weights, routing)(x, logits))


def test_bits_of_a_token_do_not_depend_on_its_company(device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    weights, (x, logits) = mixture(device, dtype), inputs(device, 20, dtype)
    experts = CudaExpertsPacker(batch_invariant=True).pack(weights, Routing(3, normalizes=True))
    whole = experts(x, logits)
    for begin, end in ((7, 8), (3, 20)):
        assert torch.equal(experts(x[begin:end], logits[begin:end]), whole[begin:end])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    assert torch.equal(experts(x[order], logits[order]), whole[order])


def test_no_tokens_give_no_tokens(device):
    weights, (x, logits) = mixture(device), inputs(device, 0)
    assert ours(weights, Routing(2))(x, logits).shape == (0, 48)


def test_tiles_are_enough_for_any_choice():
    for tokens, k, experts, pairs in ((1, 8, 128, 16), (64, 8, 128, 16), (33, 2, 8, 32), (5, 12, 12, 16)):
        most = most_tiles(tokens, k, experts, pairs)
        for whole in range(tokens * k // pairs + 1):  # tiles that are whole, and the rest by ones as far as there are
            rest = tokens * k - whole * pairs
            assert whole + min(rest, experts) <= most


def memory(major, minor, num_bytes):
    return ProgramMemory.of(SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=num_bytes))


H200 = memory(9, 0, 232448)
DEVICES = {
    "A100": memory(8, 0, 166912), "A10": memory(8, 6, 101376), "L4": memory(8, 9, 101376), "H200": H200,
    "B200": memory(10, 0, 232448), "RTX 5090": memory(12, 0, 101376),
}  # fmt: skip
CHOSEN = (
    ((16, 64, 128, 8, 3, 4, True, False, False), (16, 128, 128, 8, 3, 4, True, False, False)),
    ((32, 64, 64, 8, 3, 4, True, False, False), (32, 128, 64, 8, 5, 4, True, False, False)),
    ((64, 64, 64, 8, 3, 4, True, False, False), (64, 128, 64, 8, 3, 4, True, False, False)),
    ((128, 128, 64, 4, 4, 8, False, True, True), (128, 256, 64, 8, 4, 8, False, True, False)),
)
"""Measured on an H200 (benchmarks/results/experts-h200-2026-11-30.md)."""


@pytest.mark.parametrize(
    ("num_experts", "k", "borders"), [(128, 8, (128, 256, 512)), (64, 6, (128, 256, 512)), (32, 4, (64, 128, 256))]
)
@pytest.mark.parametrize("name", ["H200", "B200", "A100"])
def test_large_devices_keep_the_tiles_of_the_benchmarks(name, num_experts, k, borders):
    tiles = choose_expert_tiles(torch.bfloat16, num_experts, k, DEVICES[name], batch_invariant=False)
    assert [one.most for one in tiles.grouped] == [*borders, ANY]
    assert tuple((astuple(one.up), astuple(one.down)) for one in tiles.grouped) == CHOSEN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_tiles_of_experts_fit_the_memory_of_every_device(name, dtype):
    device = DEVICES[name]
    for one in choose_expert_tiles(dtype, 128, 8, device, batch_invariant=False).grouped:
        assert tile_bytes(one.up, dtype, device, gated=True) <= device.num_bytes
        assert tile_bytes(one.down, dtype, device, gated=False) <= device.num_bytes


@pytest.mark.parametrize("name", ["A10", "L4", "RTX 5090"])
def test_devices_of_less_memory_have_fewer_pieces_on_the_way_and_only_where_they_must(name):
    tiles = choose_expert_tiles(torch.bfloat16, 128, 8, DEVICES[name], batch_invariant=False)
    assert tuple((astuple(one.up), astuple(one.down)) for one in tiles.grouped[:3]) == CHOSEN[:3]
    (up, down), many = CHOSEN[3], tiles.grouped[3]
    assert (many.up, many.down) == (replace(GroupTiles(*up), stages=3), replace(GroupTiles(*down), stages=3))


def test_a_device_without_memory_for_experts_is_told():
    with pytest.raises(ConfigError, match=r"experts takes 49,216 bytes .* the device has 49,152\. .* backend=cpu"):
        choose_expert_tiles(torch.bfloat16, 128, 8, memory(8, 9, 49152), batch_invariant=False)


def test_tiles_are_chosen_for_the_largest_size_at_or_above_the_tokens():
    tiles = choose_expert_tiles(torch.bfloat16, 128, 8, H200, batch_invariant=False)
    assert [one.most for one in tiles.grouped] == [128, 256, 512, ANY]
    assert [tiles.of(tokens).up.pairs for tokens in (5, 128, 129, 512, 513, 1 << 20)] == [16, 16, 32, 64, 128, 128]
    assert tiles.most_rows == 4


def test_where_bits_depend_on_the_token_alone_nothing_is_multiplied_row_by_row():
    for dtype in DTYPES:
        fast, invariant = (choose_expert_tiles(dtype, 128, 8, H200, batch_invariant=on) for on in (False, True))
        assert invariant.rows == () and invariant.grouped == fast.grouped
        assert len(fast.grouped) == (4 if dtype.itemsize == 2 else 1)


def test_a_row_has_its_own_blocks():
    tiles = choose_expert_tiles(torch.bfloat16, 128, 8, H200, batch_invariant=False)
    assert [tiles.rows_of(tokens).most for tokens in (1, 2, 4)] == [1, 4, 4]


def test_gates_and_ups_are_one_product_where_a_descriptor_can_read_them(device):
    for size, joins in ((48, True), (20, False)):
        weights, (x, logits) = mixture(device, torch.float16, size=size), inputs(device, 5, torch.float16, size=size)
        actual = ours(weights, Routing(2), SMALL["joined"])
        assert actual._joins(JOINED) == joins
        close(actual(x, logits), ReferenceExperts(weights, Routing(2))(x, logits))


# ------------------------------------------------------------------------------------------------- on a device alone

REAL = {
    "qwen3-30b": (2048, 128, 768, Routing(8, normalizes=True), {}),
    "v2-lite": (2048, 64, 1408, Routing(6), {}),
    "gpt-oss": (2880, 32, 2880, Routing(4, "selected"), {"activation": "clamped", "bias": True}),
    "odd": (400, 37, 208, Routing(5, "sigmoid"), {}),
}


@pytest.fixture(params=REAL.values(), ids=REAL)
def real(request):
    """(experts as they are packed, reference, inputs by number of tokens), in bfloat16."""
    size, experts, width, routing, words = request.param
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights = mixture(device, dtype, experts, size, width, **words)
    packed = CudaExpertsPacker(batch_invariant=False).pack(weights, routing)

    def given(tokens, seed=1):
        return inputs(device, tokens, dtype, experts, size, seed)

    return packed, ReferenceExperts(weights, routing), given


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 130, 700, 3000])
def test_mixtures_of_real_sizes_equal_the_reference(real, num_tokens):
    packed, reference, given = real
    x, logits = given(num_tokens)
    close(packed(x, logits), reference(x, logits))
    assert torch.equal(packed.counts, reference.counts)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [3, 48, 900])
def test_one_expert_of_real_size_may_get_every_token(real, num_tokens):
    packed, reference, given = real
    x, logits = given(num_tokens)
    logits[:, 7] += 100
    close(packed(x, logits), reference(x, logits))


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [2, 48, 300])
def test_a_recorded_mixture_follows_its_inputs(real, num_tokens):
    packed, reference, given = real
    x, logits = (one.clone() for one in given(num_tokens))
    real_tokens = torch.full((1,), num_tokens, dtype=torch.int32, device=x.device)
    packed(x, logits, real_tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed(x, logits, real_tokens)
    packed.counts.zero_()
    for seed, padding in ((5, 0), (6, 1), (7, 0)):
        fresh = given(num_tokens, seed)
        x.copy_(fresh[0]), logits.copy_(fresh[1]), real_tokens.fill_(num_tokens - padding)
        graph.replay()
        close(out[: num_tokens - padding], reference(x, logits, real_tokens)[: num_tokens - padding])
        assert (out[num_tokens - padding :] == 0).all()
    assert torch.equal(packed.counts, reference.counts)


@pytest.mark.cuda
def test_a_mixture_gives_the_same_bits_every_time(real):
    packed, _, given = real
    for num_tokens in (4, 64, 2000):
        first = packed(*given(num_tokens))
        assert all(torch.equal(packed(*given(num_tokens)), first) for _ in range(20))


@pytest.mark.cuda
@pytest.mark.parametrize("case", REAL.values(), ids=REAL)
def test_bits_of_a_token_of_real_size_do_not_depend_on_its_company(case):
    size, num_experts, width, routing, words = case
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights = mixture(device, dtype, num_experts, size, width, **words)
    packed = CudaExpertsPacker(batch_invariant=True).pack(weights, routing)
    most = 2048
    x, logits = inputs(device, most, dtype, num_experts, size)
    whole = packed(x, logits)
    sizes = [min(one.most, most - 3) for one in packed._tiles.grouped]
    assert len({packed._tiles.of(one).up.pairs for one in sizes}) == len(sizes) == 4
    for tokens in (1, 2, 16, *sizes):
        for begin in (0, 3):
            end = begin + tokens
            assert torch.equal(packed(x[begin:end], logits[begin:end]), whole[begin:end])
