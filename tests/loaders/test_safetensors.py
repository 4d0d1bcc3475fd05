"""Safetensors folders: shards, dtypes, and every way in which a folder is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from framework.errors import CheckpointError
from framework_loaders.safetensors import SafetensorsLoader

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4.0)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def write_shards(folder, weight_map=None):
    save_file({"a": A}, folder / "model-1.safetensors")
    save_file({"b": B}, folder / "model-2.safetensors")
    index = {"weight_map": weight_map or {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def opened(folder, dtype=torch.float32):
    loader = SafetensorsLoader({})
    return loader.open(loader.checkpoint(folder), dtype=dtype, device=torch.device("cpu"), seed=0)


def test_shards_are_read_through_their_index(folder):
    write_shards(folder)
    source = opened(folder)
    assert torch.equal(source.take("a", (2, 3)), A)
    assert source.unused() == ["b"]
    assert torch.equal(source.take("b", (4,)), B)
    assert source.unused() == [] and source.has("a") and not source.has("c")


def test_dtype_is_the_sources_unless_another_is_asked_for(folder):
    save_file({"a": A, "b": B.half()}, folder / "model.safetensors")
    source = opened(folder, torch.bfloat16)
    assert torch.equal(source.take("a", (2, 3)), A.bfloat16())
    assert torch.equal(source.take("b", (4,), torch.float32), B)


def test_a_tensor_that_was_taken_does_not_follow_the_file(folder):
    path = folder / "model.safetensors"
    save_file({"a": A}, path)
    source = opened(folder)
    taken = source.take("a", (2, 3))
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff\xff\xff\x7f")
    source.close()
    assert torch.equal(taken, A)


def test_missing_tensor_and_wrong_shape_name_the_nearest_and_both_shapes(folder):
    save_file({"model.norm.weight": B}, folder / "model.safetensors")
    source = opened(folder)
    with pytest.raises(
        CheckpointError, match=r"'model.norms.weight' \[4\] is missing. Did you mean 'model.norm.weight'"
    ):
        source.take("model.norms.weight", (4,))
    with pytest.raises(CheckpointError, match=r"has shape \[4\], but the config asks for \[2, 2\]"):
        source.take("model.norm.weight", (2, 2))


@pytest.mark.parametrize("cut", [4, 40, -4])
def test_a_cut_file_is_refused_by_name(folder, cut):
    path = folder / "model.safetensors"
    save_file({"a": A}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a whole safetensors file"):
        opened(folder)


def test_a_missing_shard_is_named(folder):
    write_shards(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: this shard is named by .*index.json and missing"):
        opened(folder)


def test_a_name_in_another_shard_than_the_index_says_is_refused(folder):
    write_shards(folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-1.safetensors: tensor 'b', which .* puts there, is not"):
        opened(folder)


def test_a_damaged_index_is_refused(folder):
    write_shards(folder, {"a": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="'weight_map' must map names to files of this folder"):
        opened(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json: not readable as JSON"):
        opened(folder)


def test_shards_without_an_index_are_named(folder):
    save_file({"a": A}, folder / "model-1.safetensors")
    with pytest.raises(
        CheckpointError, match=r"neither model.safetensors nor .* is there \(found: model-1.safetensors"
    ):
        opened(folder)


def test_a_quantised_tensor_is_refused_instead_of_read_without_its_scale(folder):
    save_file({"a": A.to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="tensor 'a' is stored as F8_E4M3; checkpoints quantised like this are not built yet"
    ):
        opened(folder).take("a", (2, 3))


def test_bytes_are_read_where_bytes_are_asked_for_and_nowhere_else(folder):
    codes = torch.tensor([[0, 7, 255]], dtype=torch.uint8)
    save_file({"codes": codes, "a": A}, folder / "model.safetensors")
    source = opened(folder)
    assert torch.equal(source.take("codes", (1, 3), torch.uint8), codes)
    with pytest.raises(CheckpointError, match=r"tensor 'codes' is stored as U8; .* not built yet .read: F64, F32"):
        source.take("codes", (1, 3))
    with pytest.raises(CheckpointError, match=r"tensor 'a' is stored as F32; .* not built yet .read: U8"):
        source.take("a", (2, 3), torch.uint8)


def test_code_that_comes_with_a_checkpoint_is_refused_where_it_is_to_be_run(folder):
    (folder / "config.json").write_text(json.dumps({"trust_remote_code": True}))
    with pytest.raises(CheckpointError, match=r"config.json: trust_remote_code=True asks for code of the checkpoint"):
        SafetensorsLoader({}).checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "expected a JSON object, got list"), ("{", "not readable as JSON")]
)
def test_a_damaged_config_is_named(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsLoader({}).checkpoint(folder)


def test_checkpoint_reads_the_small_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    checkpoint = SafetensorsLoader({}).checkpoint(folder)
    assert checkpoint.architectures == ("LlamaForCausalLM",)
    assert checkpoint.generation_config == {"eos_token_id": 3} and checkpoint.tokenizer is None
    (folder / "tokenizer.json").write_text("{}")
    assert SafetensorsLoader({}).checkpoint(folder).tokenizer == folder
