"""Every block format, bit-equal in float32 to the gguf package, which is the reference."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference

from framework_loaders.gguf_blocks import CHUNK_VALUES, FORMATS, OTHER_FORMATS, dequantize

# Where each format keeps float16 numbers: random bytes there would be NaN and infinity.
HALVES = {"F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def random_blocks(format, count, seed=0):
    rng = np.random.default_rng(seed)
    if format.name in ("F32", "BF16"):
        wide = rng.standard_normal(count).astype(np.float32)
        return (
            wide.view(np.uint8) if format.name == "F32" else wide.view(np.uint16)[1::2].copy().view(np.uint8)
        ).copy()
    blocks = rng.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
    for at in HALVES[format.name]:
        blocks[:, at : at + 2] = rng.standard_normal(count).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("kind", FORMATS)
def test_format_is_bit_equal_to_the_reference(kind, pool):
    format = FORMATS[kind]
    count = 2 * (CHUNK_VALUES // format.values) + 3  # more than one chunk a thread, and a ragged end
    raw = random_blocks(format, count)
    count = len(raw) // format.block_bytes
    expected = reference(raw.reshape(count, -1), GGMLQuantizationType(kind)).reshape(-1)
    out = torch.empty(count * format.values)
    dequantize(torch.from_numpy(raw), format, out, pool)
    assert np.array_equal(out.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("kind", FORMATS)
def test_narrow_output_is_the_float32_value_rounded_once(kind, pool):
    format = FORMATS[kind]
    raw = torch.from_numpy(random_blocks(format, 66, seed=1))
    wide = torch.empty(len(raw) // format.block_bytes, format.values)
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    dequantize(raw, format, wide, pool)
    dequantize(raw, format, narrow, pool)
    assert torch.equal(narrow, wide.to(torch.bfloat16))


def test_format_table_agrees_with_the_reference():
    for kind, format in FORMATS.items():
        assert (format.values, format.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        assert GGMLQuantizationType(kind).name == format.name
    assert all(GGMLQuantizationType(kind).name == name for kind, name in OTHER_FORMATS.items())
    assert not FORMATS.keys() & OTHER_FORMATS.keys()
