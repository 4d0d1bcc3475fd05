"""schemathesis reads the OpenAPI document of a running server and asks what it allows: no 5xx, answers as described.

A fixed seed and a bounded number of requests: what is found here is found again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from framework.testing.served import Served

from .counting import WORDS, assert_all_returned, assert_no_traceback, counted, save_counting, stream

pytestmark = [
    pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`"),
    pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis comes with the extra `clients`"),
]
NUM_EXAMPLES = 15
"""Of each operation; its smallest and largest values come on top of them."""
CHECKS = (
    "not_a_server_error", "response_schema_conformance", "content_type_conformance", "status_code_conformance",
    "response_headers_conformance",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save_counting(tmp_path_factory.mktemp("counting") / "model")
    with Served(f"model.path={folder}", *WORDS, "engine.max_model_len=64", "server.request_timeout=5") as served:
        yield served


def test_whatever_the_document_allows_gets_the_answer_that_it_describes(served, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--checks", ",".join(CHECKS),
         "--phases", "coverage,fuzzing", "--seed", "1", "--max-examples", str(NUM_EXAMPLES), "--request-timeout", "20",
         "--no-shrink", "--continue-on-failure", "--generation-database", "none"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SCHEMATHESIS_HOOKS": "openapi_hooks"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert_no_traceback(served)
    assert_all_returned(served)
    assert stream(served, 3, 20) == counted(3, 20)


def test_bodies_that_the_document_allows_are_answered_and_not_only_refused(served):
    answers = {key: value for key, value in served.metrics().items() if key.startswith("framework:http_requests_total")}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert sum(n for key, n in answers.items() if f'route="{path}"' in key and 'status="200"' in key), answers


def test_document_names_every_route_and_what_an_error_looks_like(served):
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    wanted = {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"}
    assert wanted | {"/health", "/version"} <= set(paths)
    for operation in (one for path in paths.values() for one in path.values()):
        assert {"4XX", "5XX"} <= set(operation["responses"])
