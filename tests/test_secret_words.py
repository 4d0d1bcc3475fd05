"""Which words of a command line may hold a secret."""

import pytest

from framework.secret_words import is_secret, may_hold_secret


@pytest.mark.parametrize(
    "word",
    [
        "server.api_keys=[a]", "x.api_key=a", "x.token=a", "api_key=a", "server={api_keys:[a]}", "x={a:1,token: b}",
        "x={'password': b}", '+x={y: {"secret" : b}}', "x=[{token: b}]", "x.my_token=a",
    ],
)  # fmt: skip
def test_word_that_names_a_secret_may_hold_one(word):
    assert may_hold_secret(word)


@pytest.mark.parametrize("word", ["model.tokenizer=a", "server.api_keys_file=a", "sampler.max_tokens=4", "x=token"])
def test_other_words_are_told(word):
    assert not may_hold_secret(word) and not is_secret(word.partition("=")[0])
