"""A tiny GGUF file, written by the gguf package out of named float32 tensors."""

import gguf
import numpy as np
import pytest


def permute(rows, heads):
    """Row order in which converters store q and k of Llama: the halves of a head interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


@pytest.fixture
def write_gguf(tmp_path):
    def write(model, arch="llama", *, extra=(), tensors=(), skip=(), change=lambda name, value: value):
        """model  a transformers model; extra  {key: value} more metadata; change(name, value)  replaces a tensor."""
        config, path = model.config, tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        for key, value in dict(extra).items():
            _add(writer, key, value)
        for name, value in [*_tensors(model, arch), *tensors]:
            if name not in skip:
                writer.add_tensor(name, np.ascontiguousarray(change(name, value)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer, key, value):
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _tensors(model, arch):
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        part = name.split(".")[-2]
        yield gguf_name(name), permute(array, heads[part]) if arch == "llama" and part in heads else array
