"""The CUDA benchmark where no device is: its workload, what it makes of a trace, and its parts on a tiny model."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from framework import LLM

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda(script):
    return script("cuda")


@pytest.fixture
def small(cuda, monkeypatch):
    """The benchmark with prompts of ids that a tiny model has, and few of them."""
    monkeypatch.setattr(cuda, "DECODE_PROMPT", 20)
    monkeypatch.setattr(cuda, "LONG_PROMPT", 64)
    monkeypatch.setattr(cuda, "prompts_of", lambda count, length, seed: [[3 + i] * length for i in range(count)])
    return cuda


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    words = ["backend=cpu", "engine.load_format=dummy", "engine.dtype=float32", "engine.async_scheduling=true"]
    words += ["scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=64", "kv_cache.num_blocks=100"]
    with LLM(str(folder), overrides=[*words, "engine.max_model_len=400", "kv_cache.prefix_caching=false"]) as made:
        yield made


def test_workload_is_the_one_that_other_engines_are_measured_with(cuda):
    work = cuda.workload()
    prompts, outputs = [len(ids) for ids, _ in work], [length for _, length in work]
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)
    assert min(prompts + outputs) >= 100 and max(prompts + outputs) <= 1024
    assert max(max(ids) for ids, _ in work) == 10_000


def test_without_a_device_one_line_says_so(cuda, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["cuda.py"])
    with pytest.raises(SystemExit) as end:
        cuda.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert err == "benchmarks/cuda.py: torch sees no CUDA device here, and nothing was measured\n"


def test_a_part_that_is_not_there_is_refused_by_name(cuda, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cuda.py", "--parts", "abx"])
    with pytest.raises(SystemExit) as end:
        cuda.main()
    assert end.value.code == 2 and "--parts abx: there is no part x; the parts are abdcp" in capsys.readouterr().err


def test_floors_stand_beside_tokens_steps_and_prompts_and_nothing_else(cuda, script):
    figure, floors = script("figures").Figure, script("floors")
    work, ceilings = floors.Work.of(TINY), floors.Ceilings(1e9, 1e9)
    requests = [([1] * 6, 3), ([1] * 3, 2)]

    def floor(part, what):
        return cuda.with_floor(figure(part, what, "", [1.0]), work, ceilings, requests).floor

    assert floor("c", "penalties: output tokens") == 5 / work.workload_s(ceilings, [(6, 3), (3, 2)])
    assert floor("b", "decode step, batch 16") == 1e3 * work.decode_s(ceilings, 16, 16 * 1040)
    assert floor("d", "prompt of 8192 tokens to its token") > 1e3 * work.prompt_s(ceilings, 8192)
    assert floor("b", "host, batch 16") is None and floor("a", "temperature 0.6: warm-up pass") is None


def test_rest_of_the_host_is_what_no_part_names_and_the_devices_time_is_none_of_it(cuda):
    us = cuda.host_us(100e-6, {"schedule": 10e-6, "prepare": 15e-6, "forward": 5e-6, "wait": 0.05, "update": 20e-6})
    assert us == pytest.approx(
        {"schedule": 10, "prepare": 15, "forward": 5, "update": 20, "rest": 50, "whole": 100}, abs=1e-6
    )


def event(name, start, us, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": us}


def test_kernels_between_the_marks_are_summed_by_kind(cuda):
    events = [event("profiled steps begin", 10, 1, "user_annotation"), event("profiled steps end", 90, 1, "cpu_op")]
    events += [event("decode_kernel", 5, 3), event("decode_kernel", 20, 4), event("decodes_kernel", 30, 2)]
    events += [event("nvjet_tst_64x8_64x16", 40, 6), event("Memcpy HtoD", 50, 2, "gpu_memcpy"), event("x", 95, 9)]
    events += [event("cudaGraphLaunch", 20, 9, "cuda_runtime"), {"ph": "M", "name": "decode_kernel"}]
    assert cuda.kernels_by_kind(events, 2) == {"attention": 2.0, "step": 1.0, "matrices": 3.0, "other": 1.0}


def test_every_kernel_of_ours_has_a_kind(cuda):
    folders = ("plugins/backends/framework_backends/triton", "plugins/attention/framework_attention/triton")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).glob("*.py")]
    names = [name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)]
    assert len(names) > 10
    unknown = [name for name in names if not any(re.search(kind, name) for kind in cuda.KERNELS.values())]
    assert unknown == [], "put them into KERNELS of benchmarks/cuda.py"


def test_throughput_counts_output_tokens_of_passes_behind_a_warm_one(small, llm):
    requests = [([5] * 9, 30), ([6] * 4, 12)]
    rate, first = small.throughput(llm, requests, 2, "c", "logprobs 5", logprobs=5)
    assert len(rate.values) == 2 and rate.is_rate and rate.median > 10
    assert (rate.what, first.what, len(first.values)) == ("logprobs 5: output tokens", "logprobs 5: warm-up pass", 1)


def test_decode_tells_steps_and_the_host_apart(small, llm):
    figures = {one.what: one for one in small.decode(llm, 3, 1)}
    assert len(figures["decode step, batch 3"].values) == 88 and len(figures["host, batch 3"].values) == 32
    parts = [what for what in figures if what.startswith("host, batch 3: ")]
    assert {"schedule", "rows", "prepare", "update", "rest"} <= {part.rpartition(" ")[2] for part in parts}
    own = sum(figures[part].values[0] for part in parts)
    assert own == pytest.approx(figures["host, batch 3"].values[0])


def test_steps_of_prompts_are_not_told_as_decode_steps(small, llm, monkeypatch):
    monkeypatch.setattr(small, "DECODE_PROMPT", 200)
    monkeypatch.setattr(small, "HOST_STEPS", range(2, 4))
    with pytest.raises(RuntimeError, match=r"by step 2: raise scheduler.max_num_batched_tokens"):
        small.decode(llm, 3, 1)


def test_long_prompts_are_told_without_those_that_warm_up(small, llm):
    (one,) = small.long_prompt(llm)
    assert (one.what, len(one.values)) == ("prompt of 64 tokens to its token", 5)


def test_differences_of_a_request_in_company_are_counted(small, llm, monkeypatch):
    monkeypatch.setattr(small, "INVARIANT_PROMPT", 30)
    monkeypatch.setattr(small, "COMPANIES", (0, 2))
    monkeypatch.setattr(small, "workload", lambda count, seed: [([7 + i] * 40, 30) for i in range(count)])
    figures = small.invariance(llm)
    assert [one.what.rpartition(" ")[2] for one in figures] == ["0", "2"]
    assert figures[0].median == 0  # sent again, alone
    told = iter([[(1, 0.5)] * 8, [(1, 0.5)] * 8, [(1, 0.5)] * 5 + [(2, 0.5), (1, 0.25), (3, 0.0)]])
    monkeypatch.setattr(small, "company", lambda *_: next(told))
    assert [one.median for one in small.invariance(llm)] == [0, 3]


def test_a_profiled_pass_leaves_its_trace_and_tells_of_a_step(small, llm, tmp_path):
    figures = {one.what: one.median for one in small.profiled(llm, 2, tmp_path, 1)}
    assert figures["batch 2: wall time, profiled"] > 0 and figures["batch 2: operators"] > 5
    assert (tmp_path / "trace-2.json").exists()


def test_what_a_failed_part_has_left_is_ended(small, llm):
    small.add_decodes(llm.engine, 2)
    llm.engine.step()
    small.abort_all(llm.engine)
    assert not llm.engine.has_unfinished_requests()


def test_a_run_leaves_its_report_with_floors_and_with_what_failed(small, script, monkeypatch, tmp_path):
    words = ["backend=cpu", "engine.load_format=dummy", "engine.dtype=float32", "scheduler.max_num_seqs=2"]
    monkeypatch.setattr(small, "FIXED", (*words, "engine.max_model_len=256"))
    monkeypatch.setattr(small, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(small, "measure_ceilings", lambda dtype: script("floors").Ceilings(2e9, 1e9))
    monkeypatch.setattr(small, "facts_of", lambda shape: {"shape": shape})
    args = SimpleNamespace(
        shape="tiny", parts="bd", batches="3", reps=1, out=tmp_path, words=["kv_cache.num_blocks=40"]
    )
    small.measure(script("figures").Report("cuda-tiny", tmp_path), args, tmp_path)
    told = json.loads((tmp_path / "cuda-tiny.json").read_text())
    assert [one["part"] for one in told["figures"] if one["part"] != "start-up"] == ["d"]
    assert len(told["errors"]) == 1, "three requests do not decode together in two rows"
    assert told["errors"][0].startswith("part b failed: RuntimeError: 3 prompts of 20 tokens")
    prompt = told["figures"][-1]
    assert prompt["over_floor"] == pytest.approx(prompt["median"] / prompt["floor"])
    assert (told["facts"]["shape"], told["facts"]["product"]) == ("tiny", "0 TFLOP/s")
    assert told["facts"]["engine"]["num_blocks"] == 40
