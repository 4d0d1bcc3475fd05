"""Floors of the CUDA benchmark: what is read and multiplied, counted from a config, and the times that follow."""

import pytest

TINY = {
    "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
    "intermediate_size": 8, "vocab_size": 10,
}  # fmt: skip


@pytest.fixture
def floors(script):
    return script("floors")


def norms(config):
    """Numbers that a checkpoint has beside its matrices."""
    inner = 2 * config["head_dim"] if "qwen3" in config["model_type"] else config.get("kv_lora_rank", 0)
    return config["num_hidden_layers"] * (2 * config["hidden_size"] + inner) + config["hidden_size"]


PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920, "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
}  # fmt: skip


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_shapes_have_as_many_parameters_as_their_checkpoints(floors, name, published):
    config = floors.SHAPES[name]
    work = floors.Work.of(config)
    embeddings = 1 if config["tie_word_embeddings"] else 2
    experts = work.experts.num_layers * work.experts.num_experts * work.experts.expert
    assert work.body + experts + embeddings * work.head + norms(config) == published


def test_experts_are_read_as_often_as_tokens_are_expected_to_choose_them(floors):
    experts = floors.Work.of(floors.SHAPES["deepseek-v2-lite"]).experts
    one = experts.num_layers * experts.expert
    assert experts.read(1) == pytest.approx(6 * one)
    assert [round(experts.read(n) / one, 1) for n in (16, 64)] == [50.8, 63.9]  # 64 (1 - (58 / 64)^n)
    assert experts.read(100_000) == 64 * one and experts.a_token == 6 * one


def test_a_token_of_deepseek_v2_lite_leaves_30_kib_of_latents(floors):
    work = floors.Work.of(floors.SHAPES["deepseek-v2-lite"])
    assert work.kv_values * work.itemsize == 27 * (512 + 64) * 2 == 31_104
    assert work.pair_flop == 27 * 2 * 16 * (128 + 64 + 128)


def test_work_is_counted_from_the_config(floors):
    # A layer: queries and outputs 4 x 4, keys and values 4 x 2, and three matrices of 4 x 8.
    work = floors.Work.of(TINY, itemsize=2)
    assert work.body == 3 * (2 * 16 + 2 * 8 + 3 * 32)
    assert (work.head, work.kv_values, work.pair_flop) == (40, 3 * 2 * 2, 3 * 2 * (2 * 2 * 2))
    assert work.weight_bytes(1) == work.weight_bytes(1000) == 2 * (432 + 40)


def test_small_steps_are_bound_by_reading_weights_and_large_ones_by_products(floors):
    work, keys_s = floors.Work.of(TINY), 7 * 12 * 2 / 1000
    ceilings = floors.Ceilings(copy_bytes_s=1000, matmul_flop_s=10_000)
    assert work.decode_s(ceilings, 1, 7) == pytest.approx(944 / 1000 + keys_s)
    assert work.decode_s(ceilings, 100, 7) == pytest.approx(2 * 472 * 100 / 10_000 + keys_s)


def test_prompt_multiplies_each_token_and_half_of_the_pairs(floors):
    work = floors.Work.of(TINY)
    seconds = work.prompt_s(floors.Ceilings(1.0, 1.0), 6)
    assert seconds == 2 * 432 * 6 + 48 * 6 * 6 / 2


def test_workload_is_its_prompts_and_a_step_a_token_of_the_longest(floors):
    work, ceilings = floors.Work.of(TINY), floors.Ceilings(1000, 10_000)
    steps = [(2, 6 + 1 + 3 + 1), (1, 6 + 2)]  # (rows, keys): the second request has had its two tokens by then
    expected = sum(work.prompt_s(ceilings, n) for n in (6, 3)) + sum(work.decode_s(ceilings, *step) for step in steps)
    assert work.workload_s(ceilings, [(6, 3), (3, 2)]) == pytest.approx(expected)
