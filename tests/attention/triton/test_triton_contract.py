"""The contract suite of attention plugins on `triton`: the whole table on a device, a few rows in the interpreter."""

from dataclasses import replace

import pytest

from framework.testing import attention_plugin, attention_suite
from framework.testing.attention import CASES, LONG_CASES, AttentionCase
from framework.testing.attention_suite import check_attention

from .placing import plugin_on

FEW = ("decodes_and_chunks_mixed", "padding_rows_and_tokens", "two_tokens_over_a_block_border", "window_and_sinks")
SHORT = AttentionCase(
    "window_and_sinks", (20, 0, 86), (1, 5, 9), num_heads=2, num_kv_heads=1, window=18, has_sinks=True
)


@pytest.fixture
def plugin(device):
    from framework_attention.triton.attention import TritonAttention

    return plugin_on(TritonAttention, device)


def test_contract_suite_passes(plugin, device, monkeypatch):
    if device.type == "cpu":
        caps = replace(plugin.caps, block_sizes=(32, 16), any_block_size=False, dtypes=("float32", "float16"))
        monkeypatch.setattr(plugin.target, "caps", caps)
        monkeypatch.setattr(attention_plugin, "CASES", [case for case in (*CASES, SHORT) if case.name in FEW])
        monkeypatch.setattr(attention_suite, "PROMPT", 18)
        monkeypatch.setattr(attention_suite, "RECORDED", ((40, 3, 17), (0, 5, 15)))
        monkeypatch.setattr(attention_suite, "CHUNKS", (7,))
        monkeypatch.setattr(attention_suite, "MIXED", ("two_tokens_over_a_block_border",))
    check_attention(plugin)


@pytest.mark.cuda
def test_long_contexts_equal_the_reference_on_a_device(plugin, monkeypatch):
    monkeypatch.setattr(attention_plugin, "CASES", LONG_CASES)
    attention_suite.check_output_equals_the_reference(plugin)
