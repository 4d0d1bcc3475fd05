"""The plugin over flash-attn: here over a stand-in with the library's signatures and checks, on a device over it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from framework.errors import PluginError
from framework.interfaces import AttentionContext
from framework.plugins import registry
from framework.testing import attention_plugin, attention_suite
from framework.testing.attention import CASES, LONG_CASES, AttentionCase, build
from framework.testing.attention_suite import AttentionPlugin, check_attention
from framework_attention import probes
from framework_attention.flash_attn import FlashAttn


class Library:
    """flash_attn 2.8.3 as far as a forward pass goes: names, order and defaults of arguments, and what it refuses."""

    def __init__(self, attend):
        self._attend = attend

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        assert k is None and causal and cache_seqlens.shape == (len(q),)
        self._check(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens)
        out = torch.zeros(q.shape, dtype=q.dtype)
        for row, length in enumerate(cache_seqlens.tolist()):
            if length:
                window = window_size[0]
                words = (length, softmax_scale, window, softcap)
                out[row] = self._attend(q[row], k_cache, v_cache, block_table[row], *words)
        return out

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert len(q), "what it does without a query is not said"
        assert causal and len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        self._check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        if max_seqlen_q == 1 and window_size[0] < 0:
            assert len(q) == len(block_table), "it turns queries into rows then"
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)  # the library's is empty
        starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
        for row, length in enumerate(lengths):
            tokens = slice(starts[row], starts[row + 1])
            if q[tokens].numel():
                assert length <= max_seqlen_k and len(q[tokens]) <= max_seqlen_q
                words = (length, softmax_scale, window_size[0], softcap)
                out[tokens] = self._attend(q[tokens], k, v, block_table[row], *words)
        return out

    def _check(self, q, k, v, block_table, *counts):
        assert q.dtype is k.dtype is v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert k.shape == v.shape and k.shape[1] % 256 == 0 and k.stride(-1) == v.stride(-1) == 1
        assert q.shape[1] % k.shape[2] == 0 and q.shape[2] == k.shape[3] <= 256
        assert block_table.dtype is torch.int32 and block_table.stride(-1) == 1
        assert all(count.dtype is torch.int32 and count.is_contiguous() for count in counts)


@pytest.fixture
def plugin(attend, backend_on, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", Library(attend))
    return AttentionPlugin(FlashAttn, lambda dtype: backend_on("cpu"))


def test_contract_suite_passes(plugin):
    check_attention(plugin)


@pytest.mark.cuda
@pytest.mark.parametrize("cases", [CASES, LONG_CASES], ids=["short", "long"])
def test_contract_suite_passes_on_a_device(cases, backend_on, monkeypatch):
    pytest.importorskip("flash_attn")
    plugin = AttentionPlugin(FlashAttn, lambda dtype: backend_on("cuda"))
    if cases is CASES:
        check_attention(plugin)
    else:
        monkeypatch.setattr(attention_plugin, "CASES", cases)
        attention_suite.check_output_equals_the_reference(plugin)


@pytest.mark.parametrize("padding", [0, 2])
def test_single_tokens_beside_padding_rows_equal_the_reference(plugin, padding, monkeypatch):
    case = AttentionCase("single_tokens", (5, 0, 300), (1, 0, 1), padding_tokens=padding)
    monkeypatch.setattr(attention_plugin, "CASES", [case])
    attention_suite.check_output_equals_the_reference(plugin)


def test_a_window_as_long_as_the_context_changes_nothing(plugin, monkeypatch):
    monkeypatch.setattr(attention_plugin, "CASES", [AttentionCase("wide", (9, 0), (1, 10), window=10)])
    attention_suite.check_output_equals_the_reference(plugin)


def test_only_pages_that_a_row_may_hold_are_gathered(plugin, backend_on):
    built = build(AttentionCase("decodes", (300, 5), (1, 1), blocks_ahead=3), 256, torch.bfloat16)
    assert built.batch.block_table[0].shape[1] > 4
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 2048}
    attention = FlashAttn({}, AttentionContext(backend_on("cpu"), 256, torch.bfloat16, batch_invariant=False, **limits))
    assert attention.plan(built.batch, 0)._table.shape == (2, 2)


def test_library_that_does_not_load_is_named(monkeypatch, backend_on):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    message = r"attention=flash_attn: the module 'flash_attn' is installed and does not load \(.*\). Install a build"
    with pytest.raises(PluginError, match=message):
        FlashAttn({}, SimpleNamespace(backend=backend_on("cpu"), block_size=256))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("triton", "pip install 'framework[cuda]'"),
        ("flash_attn", "pip install 'framework[flash-attn]' --no-build-isolation"),
        ("flashinfer", "pip install 'framework[flashinfer]'"),
    ],
)
def test_missing_library_is_named_with_the_command(name, command, monkeypatch):
    monkeypatch.setattr(probes, "find_spec", lambda module: None)
    assert getattr(probes, name)() == f"the module '{name}' is not installed. Install it with: {command}"


@pytest.mark.parametrize("name", ["triton", "flash_attn", "flashinfer"])
def test_library_without_a_device_is_of_no_use(name, monkeypatch):
    monkeypatch.setattr(probes, "find_spec", lambda module: module)
    monkeypatch.setattr(probes, "_NODES", ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert getattr(probes, name)() == "no NVIDIA device is there"
    monkeypatch.setattr(probes, "_NODES", ("/",))
    assert getattr(probes, name)() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert getattr(probes, name)() == "CUDA_VISIBLE_DEVICES=-1 hides every device"


def test_ours_goes_before_libraries_where_attention_is_automatic():
    priority = {spec.name: spec.priority for spec in registry().specs("attention")}
    assert priority["triton"] > priority["flash_attn"] > priority["flashinfer"] > priority["cpu"]
