"""What does not go together is refused by name before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from framework import LLM
from framework.config import compose
from framework.engine.choice import choose
from framework.engine.reasons import automatic
from framework.errors import ConfigError, FrameworkError, PluginError
from framework.interfaces import Capabilities
from framework.plugins import registry

HEADER = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a header alone; reading weights of it fails the test."""
    (tmp_path / "config.json").write_text(json.dumps(HEADER))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were opened")

    monkeypatch.setattr("framework_loaders.dummy.DummyLoader.open", fail)
    return tmp_path


WORDS = ["backend=cpu", "engine.load_format=dummy", "kv_cache.num_blocks=8"]


def build(folder: Path, *words: str) -> LLM:
    return LLM(str(folder), overrides=[*WORDS, *words])


def test_weights_are_opened_when_everything_goes_together(folder: Path) -> None:
    with pytest.raises(AssertionError, match="weights were opened"):
        build(folder)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["+sampler/stage=greedy"], FrameworkError, "greedy.*gumbel|gumbel.*greedy"),
        (["sampler.structured_outputs={regex:a}"], ConfigError, "structured_outputs.regex .* no tokenizer"),
        (["sampler.structured_outputs={regex:a}", "grammar=none"], ConfigError, "runs with grammar=none"),
        (["sampler=greedy", "sampler.top_k=5"], ConfigError, "top_k"),
        (["model=qwen3"], PluginError, "model=qwen3 serves Qwen3ForCausalLM, but .* LlamaForCausalLM. Use model=auto"),
        (
            ["model=transformers", "engine.batch_invariant=true"],
            ConfigError,
            "transformers does not offer it. Use",
        ),
        (["engine.max_model_len=65"], ConfigError, "more than the 64 positions"),
    ],
)
def test_conflict_is_named_before_weights_load(
    folder: Path, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(folder, *words)


@pytest.mark.parametrize("words", [["kv_connector=memory"], ["kv_connector=faulty", "kv_connector.inner=memory"]])
@pytest.mark.parametrize("windows", [(None, None), (8, None)], ids=str)
def test_connector_and_groups_that_do_not_go_together_are_named_before_weights_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], windows: tuple[int | None, ...]
) -> None:
    from framework_connectors.memory import MemoryConnector
    from framework_models.llama import Llama

    class TwoGroups(Llama):
        def __init__(self, config: Any, ctx: Any) -> None:
            add_layer = ctx.add_layer
            ctx.add_layer = lambda group, *sizes, **more: add_layer(
                f"g{len(ctx.layers)}", *sizes, **{**more, "window": windows[len(ctx.layers)]}
            )
            super().__init__(config, ctx)

    (folder / "config.json").write_text(json.dumps({**HEADER, "num_hidden_layers": 2}))
    monkeypatch.setattr("framework_models.llama.Llama", TwoGroups)
    has_window = windows[0] is not None
    if not has_window:
        with pytest.raises(AssertionError, match="weights were opened"):
            build(folder, *words)
        monkeypatch.setattr(MemoryConnector, "layerwise", True)
    text = "has layers of window 8, whose" if has_window else "has 2 KV groups, whose layers share"
    with pytest.raises(ConfigError, match=f"{words[0]} moves .* model=llama {text}"):
        build(folder, *words)


def test_an_architecture_without_a_plugin_is_shown_the_generic_path(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**HEADER, "architectures": ["StableLmForCausalLM"]}))
    with pytest.raises(PluginError, match=r"no .* 'StableLm.*Slower, .* more architectures: model=transformers$"):
        build(folder)


def test_the_generic_path_is_taken_by_name_for_any_architecture_and_never_by_itself(folder: Path) -> None:
    choice = choose(compose([f"model.path={folder}", *WORDS]), registry())
    assert choice.model.name == "llama"
    named = choose(compose(["model=transformers", f"model.path={folder}", *WORDS]), registry())
    assert (named.model.name, named.buckets) == ("transformers", [])
    assert [layer.head_dim for layer in named.layers] == [16]
    reasons = {reason.key: reason for reason in automatic(named, registry())}
    assert "the generic path" in reasons["model"].why and "slower" in reasons["model"].why


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("scheduler.max_num_seqs=100000000", r"scheduler\.max_num_seqs=100000000 wants 52\.8 GB, and 8\.0 GB are free"),
        (
            "scheduler.max_num_batched_tokens=1000000000000",
            r"tokens=1000000000000 wants 32,000\.0 GB, .*Use 250000000 or",
        ),
    ],
)
def test_limit_whose_tables_want_more_memory_than_there_is_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setattr("framework_backends.cpu.free_bytes", lambda: 8 * 10**9)
    with pytest.raises(ConfigError, match=message):
        build(folder, word)


def test_small_tables_are_asked_for_whatever_is_said_to_be_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework_backends.cpu.free_bytes", lambda: 0)
    with pytest.raises(AssertionError, match="weights were opened"):
        build(folder)


def test_named_model_of_another_architecture_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**HEADER, "architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(PluginError, match=r"model=llama serves LlamaForCausalLM, but .* GemmaForCausalLM"):
        build(folder, "model=llama")


def test_unsupported_architecture_is_refused_with_the_list_of_what_is_supported(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**HEADER, "architectures": ["NoneForCausalLM"]}))
    with pytest.raises(PluginError, match=r"'NoneForCausalLM'.* Supported: .*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        build(folder)


@pytest.mark.parametrize("size", [None, "64", 0, True])
def test_vocabulary_of_no_size_is_refused(folder: Path, size: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**HEADER, "vocab_size": size}))
    with pytest.raises(FrameworkError, match="vocab_size must be a positive integer"):
        build(folder)


def test_backend_that_does_not_keep_batch_invariance_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework_backends.cpu import CpuBackend

    made = CpuBackend.__init__

    def without(self: CpuBackend, *args: Any) -> None:
        made(self, *args)
        self.caps = Capabilities()

    monkeypatch.setattr(CpuBackend, "__init__", without)
    with pytest.raises(ConfigError, match=r"engine\.batch_invariant=true: backend=cpu does not offer it"):
        build(folder, "engine.batch_invariant=true")
