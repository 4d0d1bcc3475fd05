"""Whole engines on a CUDA device: the tokens of the host, graphs that serve any batch, no waiting, the same bits.

The models are tiny and random, in float32 where tokens are compared with those of the host's engine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams

pytestmark = pytest.mark.cuda

VOCAB, MAX_LEN = 997, 256
COMMON = (
    "engine.dtype=float32", f"engine.max_model_len={MAX_LEN}", "engine.seed=1", "scheduler.max_num_seqs=24",
    "kv_cache.num_blocks=600",  # processes share the device
)  # fmt: skip
WANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0},
    {"top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"logprobs": 3},
    {"logit_bias": {5: 3.0, 9: -50.0}},
    {"min_p": 0.05, "logprobs": 0},
    {"min_tokens": 4, "stop_token_ids": [7, 9, 11, 13]},
    {"allowed_token_ids": list(range(0, 997, 3))},
    {"bad_words_token_ids": [[3], [4, 5]]},
    {"n": 2, "top_p": 0.9},
    {"prompt_logprobs": 2, "logprob_token_ids": [1, 2]},
)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
        "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    is_llama = request.param == "llama"
    made: Any = LlamaForCausalLM(LlamaConfig(**sizes)) if is_llama else Qwen3ForCausalLM(Qwen3Config(**sizes))
    path: Path = tmp_path_factory.mktemp("tiny") / request.param
    made.float().save_pretrained(path)
    return path


def prompts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 120))]} for _ in range(count)]


def mixed(count: int) -> list[SamplingParams]:
    common = {"ignore_eos": True, "detokenize": False}
    return [SamplingParams(max_tokens=16 + i % 7, **common, **WANTS[i % len(WANTS)]) for i in range(count)]


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)] * count


def tokens(folder: Path, asked: list[dict[str, Any]], params: list[SamplingParams], *words: str) -> list[list[int]]:
    with LLM(folder, overrides=[*COMMON, *words]) as llm:
        llm.generate(asked[:5], params[:5], use_tqdm=False)  # rows and blocks have been somebody's
        found = llm.generate(asked, params, use_tqdm=False)
        stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    return [one.token_ids for request in found for one in request.outputs]


@pytest.fixture(scope="module")
def host_tokens(folder: Path) -> dict[str, list[list[int]]]:
    asked = prompts(36)
    return {
        "greedy": tokens(folder, asked, greedy(36), "backend=cpu"),
        "mixed": tokens(folder, asked, mixed(36), "backend=cpu"),
    }


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("engine.graphs=off",),
        ("engine.async_scheduling=false",),
        ("scheduler.max_num_batched_tokens=37",),
        ("kv_cache.num_blocks=40", "scheduler.preemption=swap"),
        ("kv_cache.num_blocks=40",),
        ("kv_cache.prefix_caching=false", "kv_cache.block_size=32"),
        ("engine.batch_invariant=true",),
    ],
    ids=lambda words: " ".join(words) or "default",
)
def test_tokens_are_those_of_the_host(
    kind: str, words: tuple[str, ...], folder: Path, host_tokens: dict[str, list[list[int]]]
) -> None:
    params = greedy(36) if kind == "greedy" else mixed(36)
    assert tokens(folder, prompts(36), params, "backend=cuda", *words) == host_tokens[kind]


@pytest.mark.parametrize("words", [("sampler=mirostat",), ("sampler=greedy",), ("sampler=full",)])
def test_pipelines_that_are_sampled_outside_of_graphs_keep_their_tokens(words: tuple[str, ...], folder: Path) -> None:
    """A stage that is not graph_safe runs between two graphs, or between a graph and eager operations."""
    extra: dict[str, Any] = {"sampler=greedy": {"temperature": 0}}.get(words[0], {"temperature": 0.9})
    if words == ("sampler=full",):
        extra["extra_args"] = {"no_repeat_ngram": {"size": 2}}
    params = [SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **extra)] * 12
    asked = prompts(12)
    assert tokens(folder, asked, params, "backend=cuda", *words) == tokens(folder, asked, params, "backend=cpu", *words)


def test_every_bucket_gives_what_steps_of_their_own_shape_give(folder: Path) -> None:
    """As many requests as each bucket has rows, and one less, whose requests end at different times."""
    words = (*COMMON, "backend=cuda")
    with LLM(folder, overrides=[*words, "engine.graphs=off"]) as plain, LLM(folder, overrides=words) as padded:
        for size in (1, 2, 3, 4, 7, 8, 15, 16, 17, 23, 24):
            asked, params = prompts(size, seed=size), mixed(size)
            pair = [llm.generate(asked, params, use_tqdm=False) for llm in (plain, padded)]
            ours, theirs = ([one.token_ids for request in found for one in request.outputs] for found in pair)
            assert ours == theirs, size


def test_logits_in_bfloat16_are_near_those_of_transformers(folder: Path) -> None:
    """Of the same device and dtype, for prompts and for tokens computed one by one: all logits that are told are no
    further from those of float32 than transformers' are (root mean square, a tenth for chance), and 5 % of the logits'
    spread away from them, 25 % at most: about as far as two roundings of one model are from one another."""
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=20)
    asked = prompts(8, seed=4)
    words = [*COMMON, "backend=cuda", "engine.dtype=bfloat16", "sampler.logprobs_mode=raw_logits"]
    with LLM(folder, overrides=words) as llm:
        found = [request.outputs[0] for request in llm.generate(asked, params, use_tqdm=False)]
    told = torch.tensor([one.logprob for output in found for entry in output.logprobs for one in entry.values()])

    def computed(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        """The same logits by transformers, and the spread of all."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").eval()
        values, spreads = [], []
        for prompt, output in zip(asked, found, strict=True):
            before = prompt["prompt_token_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([[*before, *output.token_ids]], device="cuda")).logits[0]
            for place, entry in enumerate(output.logprobs, start=len(before) - 1):
                values.append(logits[place].float().cpu()[list(entry)])
                spreads.append(float(logits[place].float().std()))
        return torch.cat(values), sum(spreads) / len(spreads)

    (near, _), (exact, spread) = computed(torch.bfloat16), computed(torch.float32)
    far, theirs, ours = ((x - y) / spread for x, y in ((told, near), (near, exact), (told, exact)))
    figures = {"rms": rms(far), "most": float(far.abs().max()), "theirs": rms(theirs), "ours": rms(ours)}
    assert figures["rms"] < 0.05 and figures["most"] < 0.25 and rms(ours) < 1.1 * rms(theirs), figures


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_a_step_of_decodes_waits_for_nothing_and_is_one_graph(folder: Path) -> None:
    """No call that synchronises, one graph, one copy to the device, and the result written by the graph itself."""
    from torch.profiler import ProfilerActivity, profile

    with LLM(folder, overrides=[*COMMON, "backend=cuda"]) as llm:
        engine = llm.engine
        for i, prompt in enumerate(prompts(20)):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=90, ignore_eos=True, detokenize=False))
        for _ in range(12):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            for _ in range(10):
                engine.step()
        calls = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("cuda")}
        while engine.has_unfinished_requests():
            engine.step()
    assert calls["cudaGraphLaunch"] == 10
    assert calls.get("cudaMemcpyAsync", 0) <= 10
    assert not any(calls.get(call) for call in ("cudaLaunchKernel", "cudaStreamSynchronize", "cuLaunchKernelEx"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_prompt_has_the_same_bits_in_any_company(dtype: str, folder: Path) -> None:
    """batch_invariant: alone, among neighbours, in chunks of any size, after a prefix hit."""
    words = [*COMMON, f"engine.dtype={dtype}", "backend=cuda", "engine.batch_invariant=true"]
    words.append("sampler.logprobs_mode=raw_logits")
    prompt = {"prompt_token_ids": random.Random(9).choices(range(2, VOCAB), k=97)}
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=5)
    alone: list[Any] | None = None
    for chunk in (2048, 64, 17):
        with LLM(folder, overrides=[*words, f"scheduler.max_num_batched_tokens={chunk}"]) as llm:
            for company in (0, 1, 7, 23, 60):
                others = prompts(company, seed=company + chunk)
                at = company // 2
                asked = [*others[:at], prompt, *others[at:]]
                found = llm.generate(asked, [*mixed(at), params, *mixed(company - at)], use_tqdm=False)[at].outputs[0]
                told = [[(token, one.logprob) for token, one in entry.items()] for entry in found.logprobs]
                alone = alone or [found.token_ids, told]
                assert [found.token_ids, told] == alone, (chunk, company)
