"""Weights that a job of a sweep leaves for the next one."""

import pytest
import torch

from framework.config import ComponentConfig, compose
from framework.errors import ConfigError
from framework.runs import RunArgs
from framework.runs.bench import run
from framework.runs.engines import KeptWeights, open_engine
from framework.testing.crafted import save_crafted


def test_workload_without_an_engine_finds_no_weights_in_its_way(tmp_path):
    model = save_crafted(tmp_path / "model", torch.zeros(8, 8))
    config, kept = compose([f"model.path={model}", "engine.dtype=float32", "kv_cache.num_blocks=8"]), KeptWeights()
    kept.begin(keep=True)
    for were_kept in (False, True):
        with open_engine(config, kept):
            assert kept.were_kept is were_kept
    elsewhere = ComponentConfig("serve", {"url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="does not say which models"):
        run(config, RunArgs(bench=elsewhere, kept=kept))
    with open_engine(config, kept):
        assert not kept.were_kept
