"""A replay where steps are padded and recorded once, as on a device: rows that go on without the host, and astray."""

import json

import pytest

from framework import LLM, SamplingParams
from framework.config import Config
from framework.runs import Incomplete, RunArgs
from framework.runs.replay import run
from framework_attention.cpu import CpuAttention

from ..worker.test_padded_steps import SIZES, WANTS, WORDS, TensorsOnly, folder, padded  # noqa: F401  fixtures

REQUESTS = ("temperature", "greedy", "thresholds", "penalties", "logprobs", "n")


@pytest.fixture
def recorded(folder, padded, monkeypatch, tmp_path, request):  # noqa: F811
    monkeypatch.setattr(CpuAttention, "plan", lambda owner, batch, group: TensorsOnly(owner, batch, group))
    path = tmp_path / "t.jsonl"
    prompts = [[(7 * i + j) % 40 for j in range(3 + 2 * i)] for i in range(len(REQUESTS))]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False, **WANTS[want]) for want in REQUESTS]
    with LLM(folder, overrides=[*WORDS, "kv_cache.num_blocks=18", f"trace={path}", *request.param]) as llm:
        llm.generate(prompts, params)
    assert set(padded) == set(SIZES)
    return path


@pytest.mark.parametrize(
    "recorded",
    [["engine.trace_stages=true"], ["engine.trace_stages=true", "engine.async_scheduling=true"], []],
    ids=["stages", "async", "tokens"],
    indirect=True,
)
def test_padded_steps_are_equal(recorded):
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert any(x.get("goes_on") for x in lines) and any(x.get("preempted") for x in lines)
    figures = run(Config(trace=str(recorded)), RunArgs())
    assert (figures["unlike"], figures["tokens"]) == (0, 7 * 9)


@pytest.mark.parametrize("recorded", [[]], ids=["tokens"], indirect=True)
def test_row_that_goes_astray_in_a_padded_step_comes_back(recorded, capsys):
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    number = next(n for n, x in enumerate(lines) if x.get("goes_on") and lines[n + 1].get("goes_on"))
    name = next(iter(lines[number]["tokens"]))
    lines[number]["tokens"][name][0] = (lines[number]["tokens"][name][0] + 1) % 40
    recorded.write_text("".join(json.dumps(x) + "\n" for x in lines))
    with pytest.raises(Incomplete):
        run(Config(trace=str(recorded)), RunArgs(options={"json": True}))
    report = json.loads(capsys.readouterr().out)
    first = report["first"]
    assert (first["line"], first["request"]) == (number + 1, name)
    assert report["tokens"] == 7 * 9 and {one["request"] for one in report["others"]} == set()
