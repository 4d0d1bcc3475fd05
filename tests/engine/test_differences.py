"""The first stage in which two trails of a row differ, and what two pipelines do not have in common."""

import pytest

from framework.config import SamplerConfig, StageConfig
from framework.engine.differences import first_unlike, unlike_configs

THEN = [("seed", "01"), ("logits", "aa"), ("top_k", "bb"), ("top_p", "cc"), ("gumbel", 7)]


def changed(**values):
    return [(key, values.get(key, value)) for key, value in THEN]


@pytest.mark.parametrize(
    ("now", "stage", "how"),
    [
        (changed(seed="02", logits="ab", gumbel=8), "seed", "another seed: 1 then, 2 now"),
        (changed(logits="ab", top_k="bc"), "logits", "the model's logits are others"),
        (changed(top_k="bc", top_p="cd", gumbel=9), "top_k", "from equal values it makes others"),
        (changed(gumbel=8), "gumbel", "picks another token of equal logits and limits: 7 then, 8 now"),
        ([*THEN[:2], *THEN[3:]], "top_k", "it changed the row then, and does not now"),
        ([*THEN[:2], ("min_p", "dd"), *THEN[2:]], "min_p", "it changes the row now, and did not then"),
        ([*THEN[:2], ("top_p", "cc"), ("top_k", "bb"), THEN[4]], "top_p", "it runs before top_k now, and ran behind"),
        ([*THEN[:4], ("mine", 7)], "mine", "it picks the token, in the place of gumbel"),
        ([*THEN[1:4], ("argmax", 8)], "argmax", "it picks the token, in the place of gumbel"),
    ],
)
def test_first_stage_that_differs_is_named(now, stage, how):
    found = first_unlike(THEN, now)
    assert found is not None and found.stage == stage and how in found.how


def test_equal_trails_differ_in_nothing_and_a_greedy_pipeline_does_what_a_greedy_row_does():
    assert first_unlike(THEN, changed()) is None
    assert first_unlike([("logits", "aa"), ("argmax", 7)], [("logits", "aa"), ("greedy", 7)]) is None


def test_what_pipelines_do_not_share_is_said_in_a_sentence_each():
    a, b, c = (StageConfig(name, name) for name in "abc")
    then = SamplerConfig("one", (a, b, c))
    now = SamplerConfig("two", (c, StageConfig("a", "a", {"k": 3}), StageConfig("d", "d")))
    assert unlike_configs(then, now) == [
        "b is gone", "d is new", "a has k=3, and had no options", "the order is c, a, and was a, c",
    ]  # fmt: skip
    assert unlike_configs(then, then) == []
