"""JSON of the default model at temperature 1.0: with both grammars, every finished output parses and validates."""

import json

import pytest
from jsonschema import Draft202012Validator

from framework import LLM, SamplingParams

from .schemas import SCHEMAS

MAX_TOKENS = 96


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def llm(request):
    words = ["engine.max_model_len=256", "scheduler.max_num_seqs=24", f"grammar={request.param}"]
    with LLM(overrides=[*words, "grammar.any_whitespace=false"]) as made:
        yield made


def finished(llm, num_prompts):
    """{schema: texts that ended with stop}; each of them parses and validates."""
    asked = [(name, seed) for seed in range(num_prompts) for name in SCHEMAS]
    params = [
        SamplingParams(structured_outputs={"json": SCHEMAS[name][0]}, temperature=1.0, seed=seed, max_tokens=MAX_TOKENS)
        for name, seed in asked
    ]
    outputs = llm.generate([SCHEMAS[name][1] for name, _ in asked], params, use_tqdm=False)
    texts = {name: [] for name in SCHEMAS}
    for (name, _), output in zip(asked, outputs, strict=True):
        done = output.outputs[0]
        assert done.finish_reason in ("stop", "length"), output.error
        if done.finish_reason == "stop":
            texts[name].append(done.text)
            Draft202012Validator(SCHEMAS[name][0]).validate(json.loads(done.text))
    return texts


def test_every_finished_output_parses_and_validates(llm):
    texts = finished(llm, 2)
    assert sum(map(bool, texts.values())) >= 7, texts  # a tree may go on for long


@pytest.mark.full
def test_every_finished_output_of_many_parses_and_validates(llm):
    texts = finished(llm, 50)
    assert all(texts.values()), {name: len(done) for name, done in texts.items()}
    assert sum(len(set(done)) for done in texts.values()) > 200
