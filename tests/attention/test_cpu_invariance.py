"""With `batch_invariant` a request's attention is bit-equal whatever shares its step, and however it is chunked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.interfaces import AttentionContext, LayerSpec
from framework.testing.attention import AttentionCase, build
from framework_attention import products
from framework_attention.cpu import CpuAttention
from framework_attention.products import row_padding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KV_HEADS, DIM = 6, 2, 64
BATCH_SIZES = (1, 2, 3, 7, 8, 16, 33)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_block_size = pytest.mark.parametrize("block_size", (8, 16, 32))


class Sequence:
    """One request's queries, keys and values, [length, heads, D] each."""

    def __init__(self, length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        normal = [torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.q, self.k, self.v = (x.to(dtype) for x in normal)


def attend(
    sequences: list[Sequence], spans: list[tuple[int, int]], block_size: int, *, invariant: bool, **words: Any
) -> list[Tensor]:
    """Outputs of one step in which sequence i computes its tokens spans[i] and has those before in the cache.

    words: further ones of `LayerSpec`
    """
    dtype = sequences[0].q.dtype
    case = AttentionCase("step", tuple(a for a, _ in spans), tuple(b - a for a, b in spans), HEADS, KV_HEADS, DIM)
    built = build(case, block_size, dtype, seed=len(sequences))
    ctx = AttentionContext(None, block_size, dtype, 64, 4096, 4096, invariant)  # type: ignore[arg-type]
    attention = CpuAttention({}, ctx)
    layer = LayerSpec(0, "full", HEADS, KV_HEADS, DIM, DIM**-0.5, **words)
    kv = torch.zeros(2, KV_HEADS, built.num_blocks, block_size, DIM, dtype=dtype)
    attention.bind([layer], [kv])
    slots = kv.view(2, KV_HEADS, -1, DIM)
    for sequence, where, (begin, _) in zip(sequences, built.past_slots, spans, strict=True):
        slots[0][:, where], slots[1][:, where] = (x[:begin].transpose(0, 1) for x in (sequence.k, sequence.v))
    q, k, v = (
        torch.cat([getattr(sequence, name)[a:b] for sequence, (a, b) in zip(sequences, spans, strict=True)])
        for name in "qkv"
    )
    out = attention.plan(built.batch, 0).forward(0, q, k, v)
    return list(out.split([b - a for a, b in spans]))


def alone(sequence: Sequence, block_size: int, **words: Any) -> Tensor:
    """The whole sequence in one chunk of one request."""
    return attend([sequence], [(0, len(sequence.q))], block_size, invariant=True, **words)[0]


@any_dtype
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_decode_has_the_bits_of_the_whole_prompt_in_any_batch(dtype: torch.dtype, batch_size: int) -> None:
    lengths = [5 + (37 * i * i) % 210 for i in range(batch_size)]
    sequences = [Sequence(length, seed, dtype) for seed, length in enumerate(lengths)]
    outs = attend(sequences, [(length - 1, length) for length in lengths], 16, invariant=True)
    for sequence, out in zip(sequences[:4], outs, strict=False):
        assert torch.equal(out, alone(sequence, 16)[-1:])


@any_dtype
@any_block_size
def test_chunks_of_any_size_have_the_bits_of_the_whole_prompt(dtype: torch.dtype, block_size: int) -> None:
    sequence = Sequence(150, 0, dtype)
    whole = alone(sequence, block_size)
    for size in (3, 16, 64, 100):
        spans = [(begin, min(begin + size, 150)) for begin in range(0, 150, size)]
        parts = [attend([sequence], [span], block_size, invariant=True)[0] for span in spans]
        assert torch.equal(torch.cat(parts), whole), size


@any_dtype
def test_usual_block_sizes_have_the_same_bits(dtype: torch.dtype) -> None:
    sequence = Sequence(150, 0, dtype)
    assert all(torch.equal(alone(sequence, size), alone(sequence, 16)) for size in (8, 32, 64))


@any_dtype
def test_order_of_the_batch_and_mixed_companions_change_no_bit(dtype: torch.dtype) -> None:
    sequences = [Sequence(length, seed, dtype) for seed, length in enumerate((140, 33, 90, 300, 64))]
    spans = [(139, 140), (0, 33), (40, 90), (299, 300), (63, 64)]
    expected = [alone(sequence, 16)[a:b] for sequence, (a, b) in zip(sequences, spans, strict=True)]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1], [1, 4], [2, 3, 0]):
        outs = attend([sequences[i] for i in order], [spans[i] for i in order], 16, invariant=True)
        assert all(torch.equal(out, expected[i]) for out, i in zip(outs, order, strict=True)), order


@any_dtype
@pytest.mark.parametrize("window", (None, 40, 100))
def test_windows_soft_caps_and_sinks_have_the_bits_of_the_whole_prompt(dtype: torch.dtype, window: int | None) -> None:
    words = {"window": window, "softcap": 2.0, "sinks": torch.linspace(-1, 3, HEADS).to(dtype)}
    sequences = [Sequence(length, seed, dtype) for seed, length in enumerate((340, 33, 190))]
    expected = [alone(sequence, 16, **words) for sequence in sequences]
    for spans in ([(339, 340), (0, 33), (100, 190)], [(200, 340), (32, 33), (189, 190)], [(70, 75), (5, 9), (0, 190)]):
        outs = attend(sequences, spans, 16, invariant=True, **words)
        for out, whole, (begin, end) in zip(outs, expected, spans, strict=True):
            assert torch.equal(out, whole[begin:end]), spans


def test_fast_form_depends_on_the_chunk_so_the_checks_above_can_fail() -> None:
    sequence = Sequence(150, 0, torch.float32)
    whole = attend([sequence], [(0, 150)], 16, invariant=False)[0]
    last = attend([sequence], [(149, 150)], 16, invariant=False)[0]
    assert not torch.equal(last, whole[-1:])


def test_machine_whose_products_never_agree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework_attention.products._agree", lambda left, right, pad: False)
    with pytest.raises(
        ConfigError, match=r"engine\.batch_invariant=true: batched products of torch\.float32.*engine\.dtype"
    ):
        row_padding.__wrapped__(torch.float32, 64, 64)


@pytest.mark.parametrize(
    "dtype, dim, pad", [(torch.bfloat16, 112, 16), (torch.float16, 12, 64), (torch.float32, 16, 1)]
)
def test_products_of_16_bits_have_the_rows_of_a_tile_where_processors_have_tiles(
    dtype: torch.dtype, dim: int, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a probe finds: what differs does so too rarely."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(products, "_agree", lambda *_: True)
    assert row_padding.__wrapped__(dtype, dim, 64) == pad
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert row_padding.__wrapped__(dtype, dim, 64) == 1


@pytest.mark.parametrize("dtype, dim", [(torch.float16, 12), (torch.bfloat16, 16), (torch.bfloat16, 64)])
def test_padded_products_keep_the_bits_of_a_row_in_any_company(dtype: torch.dtype, dim: int) -> None:
    pad, generator = row_padding(dtype, dim, 64), torch.Generator().manual_seed(5)
    for count in (1, 2, 3, 4, 6, 8, 16, 24) * 60:
        left, right = (torch.randn(6, n, 64, generator=generator).to(dtype) for n in (256, 64))
        right = right[..., :dim]
        some = torch.randperm(256, generator=generator)[:count]
        whole = products._padded(left, right, pad)
        for batch in (1, 2, 5, 6):
            assert torch.equal(products._padded(left[:batch, some], right[:batch], pad), whole[:batch, some])
