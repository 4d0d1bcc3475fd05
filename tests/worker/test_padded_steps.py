"""Padded steps of decodes give the tokens of steps of their own shape, whatever requests want and however they come.

The host's backend names buckets here and runs what it was to record once again for each step: the step function is
given nothing of a step but what stands in fixed memory. Attention is a plain loop that reads tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from framework import LLM, SamplingParams
from framework.batch import BlockDelta, InputBatch, SchedulerOutput
from framework.engine import build
from framework.interfaces import Bucket, ForwardContext
from framework.testing.crafted import save_crafted
from framework.worker.model_runner import ModelRunner
from framework.worker.padded import PaddedSteps, entered_blocks
from framework.worker.ragged import Forward, RaggedSteps
from framework_attention.cpu import CpuAttention
from framework_models.llama import Llama

from ..hybrid_model import hybrid, save_random

VOCAB = 40
SIZES, RAGGED = (1, 2, 4), (4, 16, 40)
WORDS = (
    "engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=5", "kv_cache.block_size=4",
    "engine.seed=3",
)  # fmt: skip
WANTS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "thresholds": {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "bias": {"logit_bias": {3: 4.0, 5: -90.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 5, 8, 13, 21, 34]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [4, 7, 9]},
    "bad_words": {"bad_words_token_ids": [[3], [4, 5]]},
    "logprobs": {"logprobs": 3},
    "logprobs of the chosen": {"logprobs": 0},
    "all logprobs": {"logprobs": -1},
    "listed": {"logprob_token_ids": [1, 2]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 2},
}


@dataclass
class TensorsOnly:
    """Attention that knows of a step what its tensors hold when a layer is computed."""

    owner: CpuAttention
    batch: InputBatch
    group: int

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bound, b = self.owner._layers[layer], self.batch
        for side, values in zip(bound.slots, (k, v), strict=True):
            side.index_copy_(1, b.slot_mapping[self.group], values.transpose(0, 1))
        out = torch.zeros_like(q)
        for i, (row, length) in enumerate(zip(b.idx_mapping.tolist(), b.seq_lens.tolist(), strict=True)):
            tokens = range(int(b.query_start_loc[i]), int(b.query_start_loc[i + 1]))
            size = bound.kv.shape[3]
            blocks = b.block_table[self.group][row, : -(-length // size)].long()
            keys, values = (
                bound.kv.index_select(2, blocks)
                .flatten(2, 3)[:, :, :length]
                .repeat_interleave(q.shape[1] // k.shape[1], 1)
            )
            for token in tokens if length else ():
                end = length - (tokens[-1] - token)
                read = slice(max(0, end - (bound.spec.window or end)), end)
                scores = torch.einsum("hd,hld->hl", q[token], keys[:, read]) * bound.spec.scale
                out[token] = torch.einsum("hl,hld->hd", scores.softmax(-1), values[:, read])
        return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    return save_crafted(tmp_path_factory.mktemp("padded") / "model", table)


@pytest.fixture(params=["decodes", "prompts too"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of the buckets whose executables were made. An empty list afterwards means that nothing was padded."""
    made: list[int] = []

    def compile_(self: Any, step: Any, bucket: Bucket | None) -> Any:
        if bucket is not None:
            if bucket.query_len == 1:
                made.append(bucket.requests)
            step()
        return step

    buckets = [Bucket(n, n, n, 1) for n in SIZES]
    has_prompts = request.param == "prompts too"
    if has_prompts:
        buckets += [Bucket(n, 5, min(n, 5), n) for n in RAGGED]
    monkeypatch.setattr("framework_backends.cpu.CpuBackend.buckets", lambda *_: buckets)
    monkeypatch.setattr("framework_backends.cpu.CpuBackend.compile", compile_)
    graph = "always" if has_prompts else "decode"
    monkeypatch.setattr(CpuAttention, "caps", replace(CpuAttention.caps, graph=graph))
    yield made


def outputs(folder: Path, requests: list[dict[str, Any]], *words: str) -> list[Any]:
    prompts = [{"prompt_token_ids": [(7 * i + j) % VOCAB for j in range(3 + 2 * i)]} for i in range(len(requests))]
    params = [
        SamplingParams(max_tokens=9 + i, ignore_eos=True, detokenize=False, **want) for i, want in enumerate(requests)
    ]
    with LLM(folder, overrides=[*WORDS, *words]) as llm:
        llm.generate(prompts[:2], params[:2], use_tqdm=False)  # rows and blocks have been somebody's
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1
    return [
        (one.token_ids, one.finish_reason, one.logprobs and list(one.logprobs), request.prompt_logprobs)
        for request in found
        for one in request.outputs
    ]


@pytest.fixture
def plain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The outputs of steps of their own shape, with the attention of this module."""
    monkeypatch.setattr(CpuAttention, "plan", lambda owner, batch, group: TensorsOnly(owner, batch, group))

    def run(requests: list[dict[str, Any]], *words: str, folder: Path = folder) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("framework_backends.cpu.CpuBackend.buckets", lambda *_: [])
            return outputs(folder, requests, *words)

    return run


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one[:2] == other[:2]
        for ours, theirs in zip(one[2] or [], other[2] or [], strict=True):
            assert {i: (x.rank, pytest.approx(x.logprob, abs=1e-4)) for i, x in ours.items()} == {
                i: (x.rank, x.logprob) for i, x in theirs.items()
            }


@pytest.mark.parametrize("want", WANTS)
def test_a_request_alone_and_among_others_gives_the_same_tokens(
    want: str, folder: Path, plain: Any, padded: list[int]
) -> None:
    requests = [WANTS[want], WANTS["temperature"], WANTS[want]]
    assert_same(outputs(folder, requests), plain(requests))
    assert set(padded) == set(SIZES)


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_all_want_something_else_give_the_same_tokens(
    is_async: bool, folder: Path, plain: Any, padded: list[int]
) -> None:
    """More requests than rows and more rows than the largest bucket, in a pool that is too small for them."""
    requests, words = list(WANTS.values()), ("kv_cache.num_blocks=26", f"engine.async_scheduling={is_async}")
    assert_same(outputs(folder, requests, *words), plain(requests, *words))
    assert set(padded) == set(SIZES)


def test_backend_that_does_not_read_what_the_host_tells_gives_the_same_tokens(
    folder: Path, plain: Any, padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("framework_backends.cpu_step_ops.CpuStepOps.receive")
    requests = [WANTS["temperature"], WANTS["logprobs"], WANTS["greedy"]]
    assert_same(outputs(folder, requests), plain(requests))
    assert set(padded) == set(SIZES)


def test_layers_with_windows_give_the_same_tokens(
    tmp_path: Path, plain: Any, padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come to three groups, and go from two of them, while steps go on."""
    windows = (6, None, 9)
    monkeypatch.setattr("framework_models.llama.Llama", hybrid(windows))
    folder = save_random(tmp_path / "hybrid", len(windows))
    requests = [WANTS["temperature"], WANTS["greedy"], WANTS["logprobs"], WANTS["n"], WANTS["temperature"]]
    words = ("kv_cache.num_blocks=40", "engine.async_scheduling=true", "scheduler.max_num_batched_tokens=6")
    assert_same(outputs(folder, requests, *words), plain(requests, *words, folder=folder))
    assert set(padded) == set(SIZES)


@pytest.mark.parametrize("sampler", ["greedy", "mirostat"])
def test_other_pipelines(sampler: str, folder: Path, plain: Any, padded: list[int]) -> None:
    requests: list[dict[str, Any]] = [{"temperature": 0.0 if sampler == "greedy" else 1.0}] * 3
    assert_same(outputs(folder, requests, f"sampler={sampler}"), plain(requests, f"sampler={sampler}"))
    assert set(padded) == set(SIZES)


def test_buckets_share_one_wide_executable_once_they_have_many(
    folder: Path, plain: Any, padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.sampling.captured.MAX_SETS", 1)
    requests = [WANTS[want] for want in ("temperature", "bias", "thresholds", "penalties", "allowed", "logprobs")]
    assert_same(outputs(folder, requests), plain(requests))
    assert padded.count(4) <= 4  # plain, one that was needed first, all stages, all stages with logprobs


def test_forward_passes_alone_run_in_buckets_of_powers_of_two() -> None:
    steps = PaddedSteps([Bucket(n, n, n, 1) for n in (1, 2, 4, 8, 16, 24, 30)], None, lambda *_: None)
    found = {rows: steps.with_logits(steps.bucket(rows)).requests for rows in (1, 2, 3, 5, 9, 17, 25, 30)}
    assert found == {1: 1, 2: 2, 3: 4, 5: 8, 9: 16, 17: 30, 25: 30, 30: 30}


def scheduled(rows: list[int], computed: list[int], delta: tuple[list[int], ...]) -> SchedulerOutput:
    columns = [np.array(column, np.int32) for column in delta]
    ones = np.ones(len(rows), np.int32)
    return SchedulerOutput(
        0, np.array(rows, np.int32), ones, np.array(computed, np.int32), ones > 0, ones * 0,
        new_block_ids=(BlockDelta(*columns),),
    )  # fmt: skip


def test_blocks_that_rows_enter_are_told_by_row() -> None:
    step = scheduled([5, 2, 9], [8, 3, 12], ([9, 5], [3, 2], [1, 1], [70, 71]))
    (blocks,) = entered_blocks(step, [4]) or [None]
    assert blocks is not None and blocks.tolist() == [71, 0, 70]


def test_blocks_of_batch_rows_that_the_scheduler_names_are_not_searched_for() -> None:
    step = scheduled([5, 2, 9], [8, 3, 12], ([9, 5], [3, 2], [1, 1], [70, 71], [2, 0]))
    (blocks,) = entered_blocks(step, [4]) or [None]
    assert blocks is not None and blocks.tolist() == [71, 0, 70]


@pytest.mark.parametrize(
    "delta",
    [
        ([5], [0], [3], [1, 2, 3]),  # an arriving request's
        ([5], [1], [1], [9]),  # not the block of the token that is computed
        ([4], [2], [1], [9]),  # of a row that does not run
    ],
)
def test_other_blocks_are_not_told_by_row(delta: tuple[list[int], ...]) -> None:
    assert entered_blocks(scheduled([5, 2], [8, 3], delta), [4]) is None


def test_steps_of_an_attention_that_cannot_be_captured_keep_their_own_shape(
    folder: Path, padded: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuAttention, "caps", replace(CpuAttention.caps, graph="never"))
    outputs(folder, [{}])
    assert padded == []
    assert "attention=cpu cannot be captured: every step is launched piece by piece" in caplog.text


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the bucket of every step with prompts that ran padded, since the start of an engine."""
    found: list[int] = []
    forward, warm_up = RaggedSteps.forward, build.warm_up

    def warm(runner: Any) -> dict[str, float]:
        found.clear()
        seconds = warm_up(runner)
        assert found[:2] in ([], [max(size for size in RAGGED if size <= runner._max_num_batched_tokens), 4])
        found.clear()
        return seconds

    monkeypatch.setattr(build, "warm_up", warm)
    monkeypatch.setattr("framework.worker.ragged.AT_START", 4)  # 16 is made within a step

    def noted(self: RaggedSteps, bucket: Bucket) -> Forward:
        found.append(bucket.tokens)
        return forward(self, bucket)

    monkeypatch.setattr(RaggedSteps, "forward", noted)
    return found


@pytest.mark.parametrize("padded", ["prompts too"], indirect=True)
def test_steps_with_prompts_run_in_the_smallest_bucket_that_holds_them(
    folder: Path, plain: Any, padded: list[int], ran: list[int]
) -> None:
    limits = {4: {4}, 17: {16}, 2048: {16, 40}}
    requests = [WANTS["temperature"], WANTS["logprobs"], WANTS["greedy"], WANTS["thresholds"]]
    for tokens, sizes in limits.items():
        words = f"scheduler.max_num_batched_tokens={tokens}"
        found = outputs(folder, requests, words)
        assert set(ran) == sizes
        assert_same(found, plain(requests, words))


@pytest.mark.parametrize("padded", ["prompts too"], indirect=True)
def test_steps_that_need_more_than_the_rows_that_sample_keep_their_own_shape(
    folder: Path, plain: Any, padded: list[int], ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs(folder, [WANTS["prompt_logprobs"]])
    assert ran == []
    monkeypatch.setattr(CpuAttention, "prefers_own_shape", lambda self, counts, ends: max(counts) > 2, raising=False)
    outputs(folder, [WANTS["greedy"]] * 3)
    assert ran == []


def test_model_is_told_where_padding_begins(
    folder: Path, plain: Any, padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and wanted rows of each step, also of one that goes on; a step of its own shape has no padding."""
    passes: list[ForwardContext] = []
    steps: list[tuple[SchedulerOutput, int, ForwardContext]] = []
    forward, execute = Llama.forward, ModelRunner.execute

    def noted(self: Llama, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Any:
        counts = [None if one is None else one.clone() for one in (ctx.num_tokens, ctx.num_wanted)]
        passes.append(replace(ctx, num_tokens=counts[0], num_wanted=counts[1], plans=[len(x)]))
        return forward(self, x, positions, ctx)

    def executed(self: ModelRunner, scheduled: SchedulerOutput) -> Any:
        future = execute(self, scheduled)
        if scheduled.num_rows:
            steps.append((scheduled, passes[-1].plans[0], passes[-1]))
        return future

    monkeypatch.setattr(Llama, "forward", noted)
    monkeypatch.setattr(ModelRunner, "execute", executed)
    outputs(folder, [WANTS["temperature"], WANTS["greedy"], WANTS["prompt_logprobs"], WANTS["n"]])
    shapes = set()
    for scheduled, length, ctx in steps:
        if ctx.num_tokens is None:
            assert length == scheduled.num_tokens and ctx.num_wanted is None
        else:
            assert (ctx.num_tokens.dtype, ctx.num_tokens.tolist()) == (torch.int32, [scheduled.num_tokens])
            assert ctx.num_wanted is None or ctx.num_wanted.tolist() == [scheduled.samples.sum()]
            assert (ctx.num_wanted is None) == (ctx.wanted is None)
            shapes.add((length > scheduled.num_tokens, ctx.wanted is None))
    assert {(True, True), (False, True)} <= shapes
    has_ragged = any(not is_decode for _, is_decode in shapes)
    assert has_ragged == (CpuAttention.caps.graph == "always")


def test_a_bucket_holds_a_step_by_tokens_and_rows() -> None:
    buckets = [Bucket(n, 4, 4, n) for n in (32, 8, 4, 16)]
    steps = RaggedSteps(buckets, lambda bucket: pytest.fail("made"))
    assert [one.tokens for one in steps.at_start] == [32, 16, 8]  # of 4 tokens and rows, nobody could tell
    found = [steps.bucket(*size) for size in ((1, 1), (8, 4), (9, 1), (33, 1), (8, 5))]
    assert [one and one.tokens for one in found] == [8, 8, 16, None, None]
