"""The `llm` command, which knows the server from its file of more OpenAI models."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .asking import ANSWER, FRANCE, installed

pytestmark = installed("llm")


@pytest.fixture
def llm(served, tmp_path):
    """Runs the command in a user folder of its own: its stdout."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {served.model}\n  api_base: {served.url}/v1\n"
    )

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""},  # those of others stay out
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("how", [["--no-stream"], []], ids=["whole", "stream"])
def test_prompt_is_answered(llm, how):
    assert llm("-m", "ours", *how, "-o", "temperature", "0", "-o", "max_tokens", "16", FRANCE[0]["content"]) == ANSWER
