"""The plugin over flashinfer: here over a stand-in with the library's signatures and checks, on a device over it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from framework.config import Config, EngineOptions
from framework.engine.choice import Part, check_attention
from framework.errors import ConfigError, PluginError
from framework.interfaces import AttentionContext, LayerSpec
from framework.testing import attention_plugin, attention_suite
from framework.testing.attention import CASES, LONG_CASES
from framework.testing.attention_suite import AttentionPlugin
from framework_attention.flashinfer import FlashInfer


class Wrapper:
    """What the library's two wrappers share. A run is held against the plan before it, as there."""

    attend = None

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert float_workspace_buffer.dtype is torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD" and not use_cuda_graph

    def _keep(self, query_starts, indptr, indices, last_page_len, heads, page_size, dtypes, scale, *masks):
        assert {t.dtype for t in (query_starts, indptr, indices, last_page_len)} == {torch.int32}
        assert len(query_starts) == len(indptr) == len(last_page_len) + 1 and len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all() and (indptr.diff() > 0).all()
        lengths = (indptr.diff() - 1) * page_size + last_page_len
        pages = indices.split(indptr.diff().tolist())
        self._rows = list(zip(query_starts[:-1], query_starts[1:], pages, lengths, strict=True))
        self._heads, self._page_size, self._dtypes = heads, page_size, dtypes
        self._words = (scale, *masks)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        keys, values = paged_kv_cache
        assert self._dtypes == (q.dtype, keys.dtype) and q.stride(-1) == 1 and len(q) == self._rows[-1][1]
        assert self._heads == (q.shape[1], keys.shape[2], q.shape[2]) and keys.shape[1] == self._page_size
        result = torch.full_like(q, torch.nan)
        for first, last, pages, length in self._rows:
            tokens = slice(int(first), int(last))
            result[tokens] = type(self).attend(q[tokens], keys, values, pages, int(length), *self._words)
        return result


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, data_type=None, sm_scale=None,
    ):  # fmt: skip
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type)
        starts = torch.arange(len(indptr), dtype=torch.int32)
        masks = (window_left, logits_soft_cap)
        self._keep(starts, indptr, indices, last_page_len, heads, page_size, dtypes, sm_scale, *masks)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(qo_indptr, *pages, heads, page_size, dtypes, sm_scale, window_left, logits_soft_cap)


@pytest.fixture
def library(attend, monkeypatch):
    monkeypatch.setattr(Wrapper, "attend", staticmethod(attend))
    monkeypatch.setattr("framework_attention.flashinfer._WORKSPACE_BYTES", 1024)  # looked through for each wrapper
    wrappers = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**{one.__name__: one for one in wrappers}))


@pytest.fixture
def attention(library, backend_on):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    return FlashInfer({}, AttentionContext(backend_on("cpu"), 16, torch.bfloat16, batch_invariant=False, **limits))


def test_contract_suite_passes(library, backend_on):
    attention_suite.check_attention(AttentionPlugin(FlashInfer, lambda dtype: backend_on("cpu")))


@pytest.mark.cuda
@pytest.mark.parametrize("cases", [CASES, LONG_CASES], ids=["short", "long"])
def test_contract_suite_passes_on_a_device(cases, backend_on, monkeypatch):
    pytest.importorskip("flashinfer")
    plugin = AttentionPlugin(FlashInfer, lambda dtype: backend_on("cuda"))
    if cases is CASES:
        attention_suite.check_attention(plugin)
    else:
        monkeypatch.setattr(attention_plugin, "CASES", cases)
        attention_suite.check_output_equals_the_reference(plugin)


def test_layers_that_no_plan_serves_together_are_refused(attention):
    layers = [LayerSpec(i, "full", 4, 2, 64, 0.125, window) for i, window in enumerate((None, 16))]
    with pytest.raises(ConfigError, match=r"attention=flashinfer: one KV group holds layers of several \(window, "):
        attention.bind(layers, [torch.zeros(2, 3, 16, 2, 64)] * 2)


def test_async_scheduling_is_refused_by_name():
    part, backend = Part("flashinfer", FlashInfer, None), SimpleNamespace(dtype=torch.bfloat16)
    check_attention(part, Config(engine=EngineOptions(async_scheduling=False)), backend, 16)
    with pytest.raises(ConfigError, match=r"engine.async_scheduling=true: attention=flashinfer needs exact lengths"):
        check_attention(part, Config(engine=EngineOptions(async_scheduling=True)), backend, 16)


def test_library_that_does_not_load_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(PluginError, match="attention=flashinfer: the module 'flashinfer' is installed and does not"):
        FlashInfer({}, None)
