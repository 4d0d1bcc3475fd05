"""A request with a third party's stages has the same tokens whatever surrounds it: one of them keeps state."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from framework.testing.crafted import save_crafted

CONTROL = "without its own stages"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(installed, tmp_path_factory, request):
    """{situation: (tokens, preemptions)} of a model with attention."""
    folder = save_crafted(tmp_path_factory.mktemp("same") / "model", torch.zeros(48, 48))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("situations.py")), str(folder), request.param],
        env={
            **os.environ,
            "PYTHONPATH": str(installed),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_tokens_are_the_same_in_every_situation(found):
    tokens = {name: tokens for name, (tokens, _) in found.items() if name != CONTROL}
    assert len(tokens["alone"]) == 24
    assert tokens == dict.fromkeys(tokens, tokens["alone"])


def test_situations_are_what_they_say(found):
    """The request did yield where it should, and its stage does change its tokens."""
    assert {name for name, (_, preemptions) in found.items() if preemptions} == {
        "preempted", "swapped", "async and preempted"
    }  # fmt: skip
    assert found[CONTROL][0] != found["alone"][0]
