"""One request with a third party's stages in many situations: prints {situation: [tokens, preemptions]} as JSON.

A program of its own, `python situations.py FOLDER DTYPE`, since the packages are installed beside ours for it alone.
"""

import json
import sys

from framework import LLM, SamplingParams

STAGES = (
    "+sampler/stage=[acme_bias,acme_fatigue]", "sampler.stages.acme_bias.token_ids=[3,5,7]",
    "sampler.stages.acme_fatigue.token_ids=[3,5,7,11,13,17,19]",
)  # fmt: skip
PROMPT = [(7 * i) % 48 for i in range(21)]
ACME = {"acme_bias": {"scale": 2.5}, "acme_fatigue": {"strength": 1.5}}
SUBJECT = SamplingParams(
    seed=11, temperature=1.3, top_p=0.97, min_p=0.001, repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=24,
    extra_args=ACME,
)  # fmt: skip
NEIGHBOURS = [
    SamplingParams(temperature=0, max_tokens=30, extra_args=ACME),
    SamplingParams(max_tokens=3),
    SamplingParams(seed=11, max_tokens=24, top_k=3, extra_args={"acme_fatigue": {"strength": -4.0}}),
    SamplingParams(temperature=0.2, max_tokens=17, presence_penalty=2.0, allowed_token_ids=[1, 2, 3, 5]),
    SamplingParams(max_tokens=29, bad_words_token_ids=[[3], [5, 7]], logit_bias={7: 9.0}),
]
SWITCHED = [
    params.replace(stages=dict.fromkeys(stages, False), extra_args=None)
    for params, stages in zip(
        [SamplingParams(seed=s, max_tokens=20) for s in range(5)],
        [["acme_bias"], ["acme_fatigue", "top_p"], ["penalties"], ["temperature", "min_p", "acme_bias"], ["top_k"]],
        strict=True,
    )
]
SITUATIONS = {
    "alone": ([], []),
    "mixed batch": (NEIGHBOURS, []),
    "chunked": (NEIGHBOURS, ["scheduler.max_num_batched_tokens=5"]),
    "preempted": (NEIGHBOURS, ["kv_cache.num_blocks=28", "policy=priority"]),
    "swapped": (NEIGHBOURS, ["kv_cache.num_blocks=28", "policy=priority", "scheduler.preemption=swap"]),
    "async": (NEIGHBOURS, ["engine.async_scheduling=true"]),
    "async and preempted": (NEIGHBOURS, ["engine.async_scheduling=true", "kv_cache.num_blocks=28", "policy=priority"]),
    "stages of neighbours switched": (SWITCHED, []),
    "without its own stages": ([], ["sampler.stages.acme_fatigue.token_ids=[]"]),
}
"""{name: (neighbours, words)}. The last is the control: the stage matters."""


def run(folder, dtype, neighbours, words):
    """[tokens of the subject, preemptions]. It comes third, and with a policy of priorities yields to all others."""
    first = 5 if "policy=priority" in words else 0
    prompts = [{"prompt_token_ids": PROMPT[: 4 + 3 * i]} for i in range(len(neighbours))]
    prompts.insert(2, {"prompt_token_ids": PROMPT, "priority": first})
    params = [*neighbours[:2], SUBJECT, *neighbours[2:]]
    common = ("engine.load_format=dummy", "engine.seed=3", "engine.batch_invariant=true", "engine.max_model_len=64",
              "kv_cache.block_size=4", "engine.async_scheduling=false", f"engine.dtype={dtype}")  # fmt: skip
    with LLM(folder, overrides=[*common, *STAGES, *words]) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        subject = next(o for o in outputs if o.prompt_token_ids == PROMPT)
        return [subject.outputs[0].token_ids, llm.engine.stats()["num_preemptions"]]


if __name__ == "__main__":
    folder, dtype = sys.argv[1:]
    print(json.dumps({name: run(folder, dtype, *situation) for name, situation in SITUATIONS.items()}))
