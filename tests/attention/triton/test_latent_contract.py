"""The contract suite of attention plugins on `mla_triton`: all on a device, a few rows in the interpreter."""

from dataclasses import replace

import pytest

from framework.testing import attention_plugin, attention_suite
from framework.testing.attention import LATENT_CASES
from framework.testing.attention_suite import check_attention

from .placing import plugin_on

FEW = ("decodes_and_chunks_mixed", "padding_rows_and_tokens", "two_tokens_over_a_block_border")


@pytest.fixture
def plugin(device):
    from framework_attention.triton.latent import LatentTriton

    return plugin_on(LatentTriton, device)


def test_contract_suite_passes(plugin, device, monkeypatch):
    if device.type == "cpu":
        caps = replace(plugin.caps, block_sizes=(32, 16), any_block_size=False, dtypes=("float32",))
        monkeypatch.setattr(plugin.target, "caps", caps)
        few = [replace(case, num_heads=1) for case in LATENT_CASES if case.name in FEW]
        monkeypatch.setattr(attention_plugin, "LATENT_CASES", few)
        monkeypatch.setattr(attention_suite, "PROMPT", 18)
        monkeypatch.setattr(attention_suite, "CHUNKS", (7,))
        monkeypatch.setattr(attention_suite, "RECORDED", ((20, 3, 17), (9, 30, 0)))
        monkeypatch.setattr(attention_suite, "MIXED", ("two_tokens_over_a_block_border",))
    check_attention(plugin)
