"""`run.profile=`: a trace of a few steps, and what it says of a step, on this machine and in a device's trace."""

import json
import re

import pytest
import torch

from framework.runs.bench.trace_figures import BEGIN, END, figures_of

SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=64")
FEW = ("bench.num_prompts=3", "bench.input_len=20", "bench.output_len=40", "run.warmup=0", "run.rounds=1")


@pytest.fixture
def benched(talker, typed_here):
    """Runs `bench WORDS` in this process: (exit code, stdout, stderr)."""
    return lambda *words: typed_here("bench", f"model.path={talker}", *SMALL, *words)


@pytest.mark.parametrize("is_async", ("true", "false"))
def test_steps_of_one_more_round_are_traced_and_told_of(benched, tmp_path, is_async):
    code, out, err = benched(*FEW, "run.profile=t.json", "run.json=true", f"engine.async_scheduling={is_async}")
    assert code == 0, err
    report = json.loads(out)
    profile = report["profile"]
    assert len(report["rounds"]) == 1 and profile["num_steps"] == 16 and profile["busy_us"] is None
    trace = json.loads((tmp_path / "t.json").read_text())
    assert figures_of(trace["traceEvents"], 16).as_json() == profile
    names = [cost["name"] for cost in profile["kernels"]]
    assert len(names) == 10 and all("::" in name for name in names)
    assert {"schedule", "execute", "wait", "update"} <= {part["name"] for part in profile["parts"]}
    own = sum(cost["us"] for cost in profile["kernels"])
    assert 0 < own <= profile["wall_us"] and profile["counts"]["operators"] > 20


def test_a_round_shorter_than_the_window_is_told_of_whole(benched):
    code, out, err = benched("bench.num_prompts=1", "bench.input_len=5", "bench.output_len=3", "run.warmup=0",
                             "run.rounds=1", "run.profile=t.json", "run.json=true")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["profile"]["num_steps"] == 3


def test_the_page_says_what_a_step_takes(benched):
    code, out, _ = benched(*FEW, "run.profile=t.json")
    assert code == 0
    assert "a step, of 16 profiled" in out
    assert re.search(r"^  wall time +[\d,.]+  us$", out, re.MULTILINE)
    assert re.search(r"^ +us  of the step +calls  operators$", out, re.MULTILINE)


def test_the_profiler_is_off_again_afterwards(benched):
    assert benched(*FEW, "run.profile=t.json")[0] == 0
    assert not torch.autograd.profiler._is_profiler_enabled


def event(category, name, start, us, thread=1):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": us, "pid": 1, "tid": thread}


def device_trace():
    """Two steps: in each a graph of two kernels that overlap, one more kernel, and a copy each way."""
    events = [event("user_annotation", BEGIN, 0, 10), event("user_annotation", END, 210, 5)]
    for start in (10, 110):
        events += [
            event("user_annotation", "prepare", start, 30),
            event("cuda_runtime", "cudaMemcpyAsync", start + 1, 2),
            event("cuda_runtime", "cudaGraphLaunch", start + 4, 5),
            event("cuda_driver", "cuLaunchKernelEx", start + 10, 5),
            event("cuda_runtime", "cudaEventSynchronize", start + 20, 60),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start + 5, 1, 7),
            event("kernel", "attention", start + 10, 40, 7),
            event("kernel", "product", start + 40, 20, 8),
            event("kernel", "product", start + 70, 10, 7),
            event("gpu_user_annotation", "prepare", start, 99, 7),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 85, 2, 9),
        ]
    before, after = event("kernel", "early", -50, 20, 7), event("cuda_runtime", "cudaDeviceSynchronize", 230, 5)
    return [before, *events, after, {"ph": "M", "name": "process_name", "ts": 0, "pid": 1}]


def test_a_device_is_busy_as_long_as_something_runs_on_it():
    figures = figures_of(device_trace(), 2)
    assert figures.wall_us == 100 and figures.busy_us == 1 + 50 + 10 + 2


def test_launches_copies_and_waits_are_counted_within_the_window():
    assert figures_of(device_trace(), 2).counts == {
        "kernels": 3, "kernel launches": 1, "graph launches": 1, "waits for an event": 1, "other synchronisations": 0,
        "copies to the device": 1, "copies to the host": 1, "copies on the device": 0,
    }  # fmt: skip


@pytest.mark.parametrize("call", ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuCtxSynchronize"))
def test_a_call_that_waits_for_the_device_is_a_synchronisation(call):
    events = [*device_trace(), event("cuda_runtime", call, 50, 5)]
    assert figures_of(events, 2).counts["other synchronisations"] == 0.5


def test_kernels_are_told_by_what_they_take_a_step():
    kernels = [(cost.name, cost.us, cost.calls) for cost in figures_of(device_trace(), 2).kernels]
    assert kernels[:2] == [("attention", 40, 1), ("product", 30, 2)]


def test_the_hosts_parts_are_told_without_the_devices():
    assert [(part.name, part.us) for part in figures_of(device_trace(), 2).parts] == [("prepare", 30)]


def test_an_operator_is_told_without_those_that_it_calls():
    events = [
        event("user_annotation", BEGIN, 0, 1), event("user_annotation", END, 100, 1),
        event("cpu_op", "outer", 10, 50), event("cpu_op", "inner", 20, 30), event("cpu_op", "inner", 30, 5),
        event("cpu_op", "inner", 20, 8, thread=2),
    ]  # fmt: skip
    assert [(cost.name, cost.us) for cost in figures_of(events, 1).kernels] == [("inner", 38), ("outer", 20)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.profile=t.txt"], "run.profile=t.txt: traces are JSON. Name a file that ends in .json"),
        (["run.profile=no/such/t.json"], "run.profile=no/such/t.json: No such file"),
        (["run.profile=t.json", "output=./t.json"], "is the file of output=./t.json"),
        (["run.profile=t.json", "bench=startup"], "bench=startup runs no engine in this process"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused(benched, words, message):
    code, _, err = benched(*words)
    assert code == 2 and message in err
