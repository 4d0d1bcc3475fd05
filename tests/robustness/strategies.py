"""Values of every kind, right and wrong, for prompts, parameters and configurations; no test is here."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from framework import SamplingParams

VOCAB = 24


class Unprintable:
    """Somebody's object, whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def _repr_pretty_(self, printer, cycle):
        """What hypothesis shows of it, in a history that fails."""
        printer.text("Unprintable()")


OBJECTS = [
    None, True, False, 0, 1, -1, 2**31, 2**64, 10**5000, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, "", "a", "5",
    "\ud800", "two\nlines", b"x", bytearray(b"y"), (), [], {}, set(), range(3), object(), Unprintable(), int, 1j,
    np.int64(3), np.float32("nan"), np.array([]), np.array([1, 2]), np.array(1), np.array(["a"]), np.array(None),
    torch.tensor(1.0), torch.tensor([1, 2]), torch.ones(2, 2), SamplingParams, [None], [True], [math.nan], [[1]],
    [-1], [10**30], ["a"], [""], {1: 1}, {"a": 1}, {1: math.nan}, {(1,): {}}, {"top_p": False}, {"top_p": {"x": 1}},
]  # fmt: skip
"""One of each kind; an iterator is left out, since it would be empty at its second use."""

garbage = st.sampled_from(OBJECTS) | st.recursive(
    st.integers() | st.floats() | st.text(max_size=5) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=2),
    max_leaves=5,
)
token_id = st.integers(0, VOCAB - 1)
VALID = {
    "n": st.integers(1, 4),
    "temperature": st.sampled_from([0, 0.3, 1, 5.0]),
    "top_k": st.integers(-1, 30),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "max_tokens": st.integers(1, 12) | st.none(),
    "min_tokens": st.integers(0, 4),
    "stop": st.sampled_from(["w5", ["w7", "w7 w8"], []]),
    "stop_token_ids": st.lists(token_id, max_size=3),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "logprobs": st.integers(-1, 3),
    "prompt_logprobs": st.integers(-1, 2),
    "logprob_token_ids": st.lists(token_id, max_size=3),
    "allowed_token_ids": st.lists(token_id, min_size=1, max_size=6),
    "bad_words": st.sampled_from(["w5", ["w7", "w7 w8"], []]),
    "bad_words_token_ids": st.lists(st.lists(token_id, min_size=1, max_size=3), max_size=4),
    "logit_bias": st.dictionaries(token_id, st.floats(-100, 100), max_size=4),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "extra_args": st.sampled_from([{"no_repeat_ngram": {"size": 2}}, {"no_repeat_ngram": {}}, {"top_p": {}}]),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "output_kind": st.sampled_from(["final", "cumulative", "delta"]),
    "stages": st.sampled_from([{"top_p": False}, {"min_p": True}, {"gumbel": False}, {"topp": False}]),
}  # fmt: skip


@st.composite
def parameters(draw):
    """Keywords of SamplingParams: mostly right, some of them replaced by anything."""
    names = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=5, unique=True))
    found = {name: draw(VALID[name]) for name in names}
    if draw(st.integers(0, 2)) == 0:
        found[draw(st.sampled_from(sorted(SamplingParams.defaults())))] = draw(garbage)
    if draw(st.integers(0, 30)) == 0:
        found[draw(st.text(min_size=1, max_size=8))] = draw(garbage)
    return found


good_prompt = st.lists(token_id, min_size=1, max_size=40) | st.sampled_from(["w4", "w5 w6 w7", {"prompt": "w8"}])
prompt_key = st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "priority", "lora", "prompt_embeds", "x", 5])
prompts = st.one_of(
    good_prompt,
    good_prompt,
    st.builds(
        lambda ids, salt: {"prompt_token_ids": ids, "cache_salt": salt}, st.lists(token_id, max_size=70), garbage
    ),
    st.dictionaries(prompt_key, garbage | good_prompt, max_size=3),
    garbage,
)
