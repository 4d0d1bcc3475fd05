"""`LLM.expert_counts`: what requests gave to each expert, and nothing else."""

import json

import pytest

from framework import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}  # fmt: skip
WORDS = (
    "backend=cpu", "engine.load_format=dummy", "engine.dtype=float32", "engine.seed=3", "kv_cache.num_blocks=33",
    "kv_cache.prefix_caching=false",
)  # fmt: skip
NAMES = ["model.layers.1.mlp", "model.layers.2.mlp"]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = {"prompt_token_ids": [3, 9, 27, 17, 51, 25]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def totals(llm):
    return [sum(counts) for counts in llm.expert_counts().values()]


def run(llm, *prompts):
    llm.generate(list(prompts), GREEDY, use_tqdm=False)


def test_every_computed_token_counts_once_an_expert_it_chose(folder):
    with LLM(folder, overrides=WORDS) as llm:
        assert llm.expert_counts() == {name: [0] * 5 for name in NAMES}
        run(llm, PROMPT)
        # 6 of the prompt and 3 that were drawn; behind the last attention, 4 whose logits were read
        assert totals(llm) == [2 * 9, 2 * 4]
        run(llm, PROMPT)
        assert totals(llm) == [2 * 18, 2 * 8]


@pytest.mark.parametrize("words", [["scheduler.max_num_batched_tokens=2"], ["engine.async_scheduling=true"]])
def test_counts_are_the_same_however_steps_are_cut(folder, words):
    with LLM(folder, overrides=WORDS) as llm:
        run(llm, PROMPT, {"prompt_token_ids": [1, 2, 3]})
        expected = llm.expert_counts()
    with LLM(folder, overrides=[*WORDS, *words]) as llm:
        run(llm, PROMPT, {"prompt_token_ids": [1, 2, 3]})
        assert llm.expert_counts() == expected


def test_an_engine_counts_from_its_beginning_on_weights_that_stay(folder):
    with LLM(folder, overrides=WORDS) as llm:
        run(llm, PROMPT)
        before = llm.engine.loaded
        llm.reconfigure(["sampler.max_tokens=5"])
        assert llm.engine.loaded is before and totals(llm) == [0, 0]


def test_a_dense_model_has_no_counts(tmp_path):
    dense = {k: v for k, v in CONFIG.items() if "expert" not in k} | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with LLM(str(tmp_path), overrides=WORDS) as llm:
        assert llm.expert_counts() == {}
