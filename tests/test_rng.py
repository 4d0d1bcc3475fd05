"""The keyed random numbers are a written contract: these values never change."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework import rng

SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 2**31 - 1)

FINALISER = {0: 0, 1: 0x514E28B7, 0xDEADBEEF: 0x0DE5C6A9, 0xFFFFFFFF: 0x81F16F39}
# (seed, position, stream, level): (key words), (bits of ids 0, 1, 151935)
KNOWN = {
    (0, 0, 0, 0): ((0xD9987CDA, 0x92357AC3), (0xF4E64281, 0x80866034, 0x04D9F64E)),
    (0, 0, 0, 1): ((0x03D88409, 0xBF2C3A4A), (0x159F217F, 0x55C04A56, 0xE9FA3D3A)),
    (1, 0, 0, 0): ((0x903D2F68, 0x56FC8503), (0x64A94460, 0xF2FEE0E9, 0x5F159FC5)),
    (2**64 - 1, 0, 0, 0): ((0xC2F08528, 0xC172F8A3), (0x3A31F796, 0x7BB0E312, 0x9E730A50)),
    (0x0123456789ABCDEF, 1234, 0, 0): ((0xFE2C9897, 0x3606B4C5), (0x9B83EF8A, 0x9C897CE8, 0x75FFDE8F)),
    (0x0123456789ABCDEF, 1234, 0, 1): ((0x7A372BDA, 0x53BFFD5E), (0x7C6E8588, 0x9D786068, 0x180C49A1)),
    (42, 131071, 3, 1): ((0x3A3057E7, 0xEB2E0CC9), (0xFBACCECD, 0x55CB9F71, 0xE7F215D8)),
    (42, 7, 16, 0): ((0xBC0875C7, 0x9A9DFD91), (0xEF7C03D0, 0x02A238A0, 0x478F6852)),
}
CHILDREN = {
    (0, 1): 0xE220A8397B1DCDAF,
    (0, 2): 0x6E789E6AA1B965F4,
    (42, 1): 0xBDD732262FEB6E95,
    (2**64 - 1, 127): 0xC25747689AA56714,
}


def mix(h):
    """murmur3's finaliser, written a second time."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h // 2**shift) * factor % 2**32
    return h ^ h // 2**16


def key(seed, position, stream, level):
    seed %= 2**64
    words = []
    for h in (0x243F6A88, 0x85A308D3):
        for word in (seed % 2**32, seed // 2**32, position, stream * 2 + level):
            h = (mix(h ^ word) + 0x9E3779B9) % 2**32
        words.append(h)
    return tuple(words)


def bits(seed, position, stream, level, token):
    first, second = key(seed, position, stream, level)
    return mix(mix(token * 0x9E3779B1 % 2**32 ^ first) ^ second)


def int64(value):
    """The int64 with the bits of a 64-bit integer."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("value", FINALISER)
def test_finaliser_has_its_known_answers(value):
    assert rng.fmix32(value) == FINALISER[value]
    assert int(rng.fmix32(torch.tensor([value]))) == FINALISER[value]
    assert int(rng.fmix32(np.array([value]))[0]) == FINALISER[value]


@pytest.mark.parametrize("case", KNOWN)
def test_keys_and_bits_have_their_known_answers(case):
    words, expected = KNOWN[case]
    assert rng.row_key(*case) == words
    assert tuple(rng.random_bits(words, i) for i in (0, 1, 151935)) == expected
    ids = torch.tensor([0, 1, 151935])
    assert tuple(rng.random_bits(tuple(torch.tensor(w) for w in words), ids).tolist()) == expected


@pytest.mark.parametrize("case", CHILDREN)
def test_child_seeds_have_their_known_answers(case):
    assert rng.child_seed(*case) == CHILDREN[case]


@pytest.mark.parametrize(("key", "stream"), [("xtc", 978021626), ("", 16), ("a", 1756872291)])
def test_streams_of_stages_have_their_known_answers(key, stream):
    assert rng.stage_stream(key) == stream


@given(st.text())
def test_streams_of_stages_are_none_of_the_engines_and_fit_a_word_with_their_level(key):
    assert rng.FIRST_STAGE_STREAM <= rng.stage_stream(key) < 2**31


@given(SEEDS)
def test_first_child_has_the_parents_seed(seed):
    assert rng.child_seed(seed, 0) == seed % 2**64
    assert len({rng.child_seed(seed, i) for i in range(128)}) == 128


@given(SEEDS, POSITIONS, st.integers(0, 40), st.integers(0, 1), st.integers(0, 2**20))
def test_every_kind_of_integer_gives_the_same_bits(seed, position, stream, level, token):
    expected = bits(seed, position, stream, level, token)
    assert rng.random_bits(rng.row_key(seed, position, stream, level), token) == expected
    seeds, positions = np.array([int64(seed)]), np.array([position])
    in_numpy = rng.random_bits(rng.row_key(seeds, positions, stream, level), np.array([token]))
    assert int(in_numpy[0]) == expected
    both = rng.row_keys(torch.tensor([int64(seed)]), torch.tensor([position]), stream)
    assert both.shape == (2, 2, 1)
    in_torch = rng.random_bits((both[level, 0], both[level, 1]), torch.tensor([token]))
    assert int(in_torch) == expected


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (-(2**63), 2**63)])
def test_seeds_count_modulo_two_to_the_64(seed, same):
    assert rng.row_key(seed, 5, 0, 0) == rng.row_key(same, 5, 0, 0)


def test_seed_position_stream_level_and_id_all_matter():
    base = (7, 3, 0, 0, 11)
    others = [(7 + 2**32, 3, 0, 0, 11), (8, 3, 0, 0, 11), (7, 4, 0, 0, 11), (7, 3, 1, 0, 11), (7, 3, 0, 1, 11)]
    values = {rng.random_bits(rng.row_key(*c[:4]), c[4]) for c in (base, *others, (7, 3, 0, 0, 12))}
    assert len(values) == 7


def test_noise_is_gumbel_of_all_32_bits():
    sample = torch.tensor([0, 1, 2, 77, 2**16, 2**31, 2**32 - 2, 2**32 - 1])
    exact = [-math.log(-math.log1p(-(b + 0.5) / 2**32)) for b in sample.tolist()]
    assert torch.equal(rng.gumbel(sample), torch.tensor(exact, dtype=torch.float64).float())
    np.testing.assert_allclose(rng.gumbel_np(sample.numpy()), rng.gumbel(sample).numpy(), rtol=1e-6)
    assert rng.gumbel(sample).isfinite().all()


@pytest.mark.parametrize("height", [16, 18, 20, 22])
def test_winning_tail_has_its_exact_size(height):
    expected = -math.expm1(-math.exp(-height)) * 2**32  # how many of the 2^32 values exceed the height
    found = int((rng.gumbel(torch.arange(2000)) > height).sum())
    assert abs(found - expected) <= 1
    # Negative control: noise guarded as -log(-log(u) + 1e-6) never gets there.
    assert -math.log(1e-6) < height


def test_importing_it_imports_no_torch():
    code = "import sys, framework.rng; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
