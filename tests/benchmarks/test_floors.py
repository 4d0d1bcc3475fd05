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
    heads = 2 * config["head_dim"] if config["model_type"] == "qwen3" else 0
    return config["num_hidden_layers"] * (2 * config["hidden_size"] + heads) + config["hidden_size"]


@pytest.mark.parametrize(("name", "published"), (("llama-3.1-8b", 8_030_261_248), ("qwen3-0.6b", 596_049_920)))
def test_shapes_have_as_many_parameters_as_their_checkpoints(floors, name, published):
    config = floors.SHAPES[name]
    work = floors.Work.of(config)
    embeddings = 1 if config["tie_word_embeddings"] else 2
    assert work.body + embeddings * work.head + norms(config) == published


def test_work_is_counted_from_the_config(floors):
    # A layer: queries and outputs 4 x 4, keys and values 4 x 2, and three matrices of 4 x 8.
    work = floors.Work.of(TINY, itemsize=2)
    assert work.body == 3 * (2 * 16 + 2 * 8 + 3 * 32)
    assert (work.head, work.kv_values, work.pair_flop) == (40, 3 * 2 * 2, 3 * 2 * (2 * 2 * 2))
    assert work.weight_bytes == 2 * (432 + 40)


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
