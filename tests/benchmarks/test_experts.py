"""The benchmark of mixtures where no device is: sizes of its shapes, its floors, and what it refuses."""

import pytest
import torch


@pytest.fixture
def experts(script):
    return script("experts")


@pytest.fixture
def small(experts):
    return experts.Mixture(hidden=4, experts=8, chosen=2, width=3)


def test_sizes_are_those_of_the_published_configurations(experts, script):
    shapes = script("floors").SHAPES
    assert experts.Mixture.of(shapes["qwen3-30b-a3b"]) == experts.Mixture(2048, 128, 8, 768)
    assert experts.Mixture.of(shapes["deepseek-v2-lite"]) == experts.Mixture(2048, 64, 6, 1408)


def test_few_tokens_take_the_time_of_their_experts_weights(small, script):
    ceilings = script("floors").Ceilings(copy_bytes_s=1.0, matmul_flop_s=1e9)
    # one token of 4 numbers, two experts of three matrices of 12, two rows of 3 between them, in 2 bytes each
    assert small.up_s(ceilings, 1, 2) == 2 * (2 * 2 * 12 + 4 + 2 * 3)
    assert small.down_s(ceilings, 1, 2) == 2 * (2 * 12 + 2 * 3 + 2 * 4)
    assert small.op_s(ceilings, 1, 2) == 2 * (3 * 2 * 12 + 2 * 4)


def test_many_tokens_take_the_time_of_their_operations(small, script):
    ceilings = script("floors").Ceilings(copy_bytes_s=1e9, matmul_flop_s=1.0)
    assert small.up_s(ceilings, 100, 8) == 2 * small.down_s(ceilings, 100, 8) == 100 * 2 * 2 * 2 * 12
    assert small.op_s(ceilings, 100, 8) == 100 * 2 * 3 * 2 * 12


def test_without_a_device_one_line_says_so(experts, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["experts.py"])
    with pytest.raises(SystemExit) as end:
        experts.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert err == "benchmarks/experts.py: torch sees no CUDA device here, and nothing was measured\n"


def test_a_shape_that_is_no_mixture_is_refused_by_name(experts, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experts.py", "--shapes", "qwen3-0.6b"])
    with pytest.raises(SystemExit) as end:
        experts.main()
    assert end.value.code == 2 and "--shapes qwen3-0.6b: no mixture of that name" in capsys.readouterr().err
