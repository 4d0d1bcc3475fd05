"""Which of two keys counts in the config.json of a checkpoint that holds a text model beside others."""

import pytest

from framework.layers.nested import text_config


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"vocab_size": 7}, {"vocab_size": 7}),
        ({"vocab_size": 7, "text_config": None}, {"vocab_size": 7, "text_config": None}),
        ({"vocab_size": 7, "text_config": {"vocab_size": 8}}, {"vocab_size": 8}),
        ({"vocab_size": 7, "text_config": {"sliding_window": None}}, {"vocab_size": 7, "sliding_window": None}),
        ({"sliding_window": 7, "text_config": {"sliding_window": None}}, {"sliding_window": None}),
        ({"quantization_config": {}, "text_config": {"head_dim": 8}}, {"quantization_config": {}, "head_dim": 8}),
        (
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            {"tie_word_embeddings": False},
        ),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, {"tie_word_embeddings": True}),
    ],
)
def test_keys_of_the_text_model_stand_over_those_beside_it_but_for_the_head(config, found):
    assert text_config(config) == found
