"""A model of windows and full layers on the CPU: what is given up changes no token, and is never read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import LLM, SamplingParams
from framework.engine import build
from framework.errors import ConfigError
from framework.scheduler.kv_groups import KVGroups
from framework.scheduler.scheduler import Scheduler
from framework.worker.model_runner import ModelRunner
from framework_models.llama import Llama

from ..hybrid_model import VOCAB, hybrid, save_random

WINDOWS = (8, None, 8, 5)
BLOCK = 4
POISON = 1e4  # NaN would spoil a correct attention too: masked keys are loaded, and weigh nothing
WORDS = (
    "engine.dtype=float32", "engine.max_model_len=128", f"kv_cache.block_size={BLOCK}", "kv_cache.num_blocks=200",
    "scheduler.max_num_seqs=4", "attention=cpu",
)  # fmt: skip
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(5 + 13 * i)] for i in range(5)]
SETTINGS = {
    "plain": (),
    "chunks of 3": ("scheduler.max_num_batched_tokens=3",),
    "chunks of 7 in a small pool": ("scheduler.max_num_batched_tokens=7", "kv_cache.num_blocks=64"),
    "no prefix cache": ("kv_cache.prefix_caching=false", "scheduler.max_num_batched_tokens=16"),
    "async": ("engine.async_scheduling=true", "scheduler.max_num_batched_tokens=8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("hybrid") / "model", len(WINDOWS))


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework_models.llama.Llama", hybrid(WINDOWS))


class KeepsAll(KVGroups):
    """Gives nothing up: what the window manager must be equal to."""

    def give_up(self, blocks: Any, num_tokens: int) -> list[int]:
        return []

    def trim(self, blocks: Any, num_computed: int) -> None:
        return None


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    fixed = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "detokenize": False}
    wanted = SamplingParams(**{**fixed, **params})
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    return [completion.token_ids for one in found for completion in one.outputs]


def reference(folder: Path, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    """One request at a time, computed whole, with every block kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("framework.scheduler.scheduler.KVGroups", KeepsAll)
        with LLM(folder, overrides=[*WORDS, "kv_cache.prefix_caching=false"]) as llm:
            return [tokens for ids in prompts for tokens in tokens_of(llm, [ids], **params)]


@pytest.fixture(scope="module")
def kept_all(folder: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("framework_models.llama.Llama", hybrid(WINDOWS))
        return reference(folder)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills blocks that are given up with the first step behind that, unless somebody has them by then; tells which."""
    poisoned: list[int] = []
    pending: list[int] = []
    schedulers: list[Scheduler] = []
    give_up, execute, assemble = KVGroups.give_up, ModelRunner.execute, build._assemble

    def noted(self: KVGroups, lists: Any, num_tokens: int) -> list[int]:
        found = give_up(self, lists, num_tokens)
        pending.extend(found)
        return found

    def filled(self: ModelRunner, scheduled: Any) -> Any:
        free = [block for block in pending if not schedulers[-1].pool.ref_count(block)]
        pending.clear()
        for tensor, spec in zip(self.kv, self.kv_specs, strict=True):
            tensor.index_fill_(spec.shape.index(-1), torch.tensor(free, device=tensor.device).long(), POISON)
        poisoned.extend(free)
        return execute(self, scheduled)

    def assembled(*args: Any) -> Any:
        engine = assemble(*args)
        schedulers.append(engine.core.scheduler)
        return engine

    monkeypatch.setattr(KVGroups, "give_up", noted)
    monkeypatch.setattr(ModelRunner, "execute", filled)
    monkeypatch.setattr(build, "_assemble", assembled)
    return poisoned


@pytest.mark.parametrize("setting", SETTINGS)
def test_windows_that_give_blocks_up_equal_a_manager_that_keeps_all(
    setting: str, folder: Path, kept_all: list[list[int]]
) -> None:
    with LLM(folder, overrides=[*WORDS, *SETTINGS[setting]]) as llm:
        assert tokens_of(llm) == kept_all
        assert tokens_of(llm) == kept_all  # with what the first ones have left in the prefix cache
        stats = llm.engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


@pytest.mark.parametrize("num_swap_blocks", [0, 60])
def test_preempted_windows_equal_a_manager_that_keeps_all(num_swap_blocks: int, folder: Path) -> None:
    """Short prompts and long outputs: all are admitted, and outgrow the pool together."""
    prompts = [ids[:6] for ids in PROMPTS[1:]]
    small = ("scheduler.max_num_batched_tokens=16", "kv_cache.num_blocks=64")
    words = ("scheduler.preemption=swap", f"kv_cache.num_swap_blocks={num_swap_blocks}") if num_swap_blocks else ()
    with LLM(folder, overrides=[*WORDS, *words, *small]) as llm:
        found, stats = tokens_of(llm, prompts, max_tokens=60), llm.engine.stats()
    assert found == reference(folder, prompts, max_tokens=60)
    assert stats["num_preemptions"] and bool(stats["num_swap_outs"]) == bool(num_swap_blocks)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def test_windows_change_what_the_model_says(folder: Path, kept_all: list[list[int]], monkeypatch: Any) -> None:
    """Else none of these tests could fail."""
    monkeypatch.setattr("framework_models.llama.Llama", hybrid((None,) * len(WINDOWS)))
    with LLM(folder, overrides=WORDS) as llm:
        assert tokens_of(llm) != kept_all


@pytest.mark.parametrize("setting", ["chunks of 7 in a small pool", "no prefix cache", "async"])
def test_no_block_that_was_given_up_is_read(
    setting: str, folder: Path, kept_all: list[list[int]], poisoned: list[int]
) -> None:
    words = [*WORDS, *SETTINGS[setting], "kv_cache.prefix_caching=false"]
    with LLM(folder, overrides=words) as llm:
        assert tokens_of(llm) == kept_all
    assert len(poisoned) > 15


def test_siblings_share_a_prompt_behind_windows(folder: Path) -> None:
    alone = reference(folder)
    for words in (
        ["scheduler.max_num_seqs=2"],
        ["scheduler.max_num_batched_tokens=6", "kv_cache.prefix_caching=false"],
    ):
        with LLM(folder, overrides=[*WORDS, *words]) as llm:
            assert tokens_of(llm, n=3) == [tokens for tokens in alone for _ in range(3)]


def test_groups_share_tensors_and_memory(folder: Path) -> None:
    with LLM(folder, overrides=WORDS) as llm:
        facts = llm.engine.facts
        runner = llm.engine.core.executor._runner
    assert facts["kv_groups"] == [
        {"name": "w8.0", "kind": "sliding", "window": 8, "num_layers": 1},
        {"name": "w8.1", "kind": "sliding", "window": 8, "num_layers": 1},
        {"name": "full", "kind": "full", "window": None, "num_layers": 1},
        {"name": "w5", "kind": "sliding", "window": 5, "num_layers": 1},
    ]
    assert len(runner.kv) == 1
    assert facts["kv_bytes"] == 200 * 2 * 2 * BLOCK * 16 * 4  # keys and values, heads, tokens, head_dim, bytes
    assert facts["kv_tokens"] == 199 // 4 * BLOCK


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_windows_that_give_blocks_up_equal_a_manager_that_keeps_all_on_a_device(
    graphs: str, folder: Path, poisoned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same steps both times, so that only what stands in the blocks differs; some of it is poison."""
    words = [word for word in WORDS if not word.startswith("attention=")]
    words += ["backend=cuda", f"engine.graphs={graphs}", "scheduler.max_num_batched_tokens=7"]
    words += ["kv_cache.prefix_caching=false"]
    with LLM(folder, overrides=words) as llm:
        found = tokens_of(llm)
    assert len(poisoned) > 15
    monkeypatch.setattr("framework.scheduler.scheduler.KVGroups", KeepsAll)
    with LLM(folder, overrides=words) as llm:
        assert tokens_of(llm) == found


def test_a_connector_serves_groups_of_full_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework_connectors.block_store import drop_store

    class TwoGroups(Llama):
        def __init__(self, config: Any, ctx: Any) -> None:
            declare = type(ctx).add_layer
            ctx.add_layer = lambda group, *args, **kw: declare(ctx, f"g{len(ctx.layers) % 2}", *args, **kw)
            super().__init__(config, ctx)

    drop_store("hybrid")
    words = [*WORDS, "kv_cache.prefix_caching=false"]
    monkeypatch.setattr("framework_models.llama.Llama", hybrid((None,) * len(WINDOWS)))
    with LLM(folder, overrides=words) as llm:
        expected = tokens_of(llm)
    monkeypatch.setattr("framework_models.llama.Llama", TwoGroups)
    with LLM(folder, overrides=[*words, "kv_connector=memory", "kv_connector.store=hybrid"]) as llm:
        assert [group["num_layers"] for group in llm.engine.facts["kv_groups"]] == [2, 2]
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected
        assert llm.engine.stats()["connector_hit_tokens"] > 100
    drop_store("hybrid")


def test_a_connector_beside_windows_is_refused_before_weights_load(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_connector=memory moves blocks of every layer, and model=llama has layers"
    ):
        LLM(folder, overrides=[*WORDS, "kv_connector=memory"])


def test_a_trace_of_windows_replays(folder: Path, tmp_path: Path, capsys: Any) -> None:
    from framework.config import Config
    from framework.runs import RunArgs
    from framework.runs.replay import run

    path = tmp_path / "trace.jsonl"
    words = ["scheduler.max_num_batched_tokens=7", "kv_cache.num_blocks=600", f"trace={path}"]
    with LLM(folder, overrides=[*WORDS, *words]) as llm:
        tokens_of(llm)
        tokens_of(llm)
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if "step" in line]
    assert any(0 in group[3] for step in steps for group in step["blocks"]), "no hit left columns out"
    run(Config(trace=str(path)), RunArgs(options={"json": True}))
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["unlike"]) == (len(steps), 0)
