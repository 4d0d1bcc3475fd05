"""Whole long prompts by a library: it serves one length, gives what the kernels give, and says when it is not there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from framework.interfaces import AttentionContext, LayerSpec, Rotation
from framework.testing.attention import AttentionCase

WHOLE = AttentionCase("whole", (0,), (40,), num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.fixture
def library(device):
    from framework_attention.triton import library

    return library


def whole_prompt(library, device, num_tokens, dtype=torch.bfloat16, is_invariant=False, **words):
    backend = SimpleNamespace(name="tests", device=device)
    ctx = AttentionContext(backend, 16, dtype, 4, num_tokens, 4096, is_invariant)
    plain = LayerSpec(0, "full", 4, 2, 64, 0.125)
    return library.WholePrompt(ctx, [plain, replace(plain, **words)])


def project(one, whole=None):
    """Output of the case's step and the keys and values it wrote, with a rotation."""
    if whole is not None:
        one.attention.whole = whole
    built = one.built
    table = torch.randn(len(built.q), 2, 64, generator=torch.Generator().manual_seed(2))
    heads = torch.cat((built.q, built.k, built.v), dim=1).to(one.device)
    rotation = Rotation(table.to(one.device), built.batch.positions.to(one.device))
    return one.plan().forward_projections(0, heads, rotation, None).cpu(), one.at_slots()


def test_the_library_gives_what_the_kernels_give(step, library, device, monkeypatch):
    monkeypatch.setattr(library, "BACKEND", SDPBackend.MATH)
    monkeypatch.setattr(library, "MIN_TOKENS", 8)
    whole = whole_prompt(library, device, 40, torch.float16)
    assert whole.reason is None
    out, written = project(step(WHOLE, torch.float16), whole)
    expected, expected_written = project(step(WHOLE, torch.float16))
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)  # weights are rounded at other places
    assert torch.equal(written, expected_written)
    assert not torch.equal(out, expected)


@pytest.mark.cuda
def test_cudnn_gives_what_the_kernels_give_on_a_device(step, library, device):
    case = AttentionCase("whole", (0,), (2048,), num_heads=4, num_kv_heads=2, head_dim=64)
    whole = whole_prompt(library, device, 2048)
    assert whole.reason is None
    out, _ = project(step(case, torch.bfloat16), whole)
    expected, _ = project(step(case, torch.bfloat16))
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("scheduled", "max_lens", "num_tokens", "is_served"),
    [([40], [40], 40, True), ([40], [41], 40, False), ([39], [39], 39, False), ([20, 20], [20, 20], 40, False),
     ([39], [39], 40, False)],
)  # fmt: skip
def test_it_serves_one_length_from_position_0(
    library, device, monkeypatch, scheduled, max_lens, num_tokens, is_served
):  # fmt: skip
    monkeypatch.setattr(library, "BACKEND", SDPBackend.MATH)
    monkeypatch.setattr(library, "MIN_TOKENS", 8)
    assert whole_prompt(library, device, 40).serves(scheduled, max_lens, num_tokens) is is_served


@pytest.mark.parametrize(
    ("words", "reason"),
    [({"is_invariant": True}, "bits depend"), ({"window": 9}, "without a window"),
     ({"softcap": 2.0}, "a soft cap"), ({"sinks": torch.zeros(4)}, "or sinks"),
     ({"dtype": torch.float32}, "bfloat16 or float16"), ({"num_tokens": 2047}, "2047 tokens are too short")],
)  # fmt: skip
def test_what_it_is_not_asked_for_is_told(library, device, words, reason):
    whole = whole_prompt(library, device, **{"num_tokens": 2048, **words})
    assert reason in whole.reason and not whole.serves([2048], [2048], 2048)


def test_a_library_that_refuses_is_told_and_not_used(library, device, caplog, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(library, "scaled_dot_product_attention", refuse)
    whole = whole_prompt(library, device, 2048)
    assert whole.reason == "No available kernel. Aborting execution." and not whole.serves([2048], [2048], 2048)
    assert "prompts of 2048 tokens go without cuDNN: No available kernel" in caplog.text
