"""`lm-eval` with local-completions on a task of its own, offline: its scores are those that transformers gives.

Loglikelihoods go through `echo` with logprobs, several prompts of ids in a request; generation through stop strings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.testing.served import Served

from .asking import installed

pytestmark = [installed("lm_eval"), installed("fastapi")]
QUESTIONS = [
    ("the cat sat on", [" the mat", " a cat", " the dog on the mat"], 0),
    ("a dog ran to", [" the cat", " a mat", " sat"], 1),
    ("the mat", [" ran", " sat on a dog"], 1),
    ("on the dog sat", [" a cat", " the", " the mat the mat"], 2),
]
UNTIL, NUM_GENERATED = "a", 12
CHOICE = """
task: ours_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: ours_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["{until}"], max_gen_toks: {tokens}, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random Llama with a byte-pair tokenizer of the letters of the questions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("lm_eval") / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for question, choices, _ in QUESTIONS for text in (question, *choices)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=40, special_tokens=["<end>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.3,
        eos_token_id=0, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(folder, tmp_path_factory) -> dict[str, list[dict]]:
    """What lm-eval wrote of each task: one entry a question, in their order, and its table of results."""
    place = tmp_path_factory.mktemp("tasks")
    items = place / "items.jsonl"
    items.write_text("".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in QUESTIONS))
    for name, task in {"choice": CHOICE, "generate": GENERATE}.items():
        (place / f"{name}.yaml").write_text(task.format(items=items, until=UNTIL, tokens=NUM_GENERATED))
    with Served(f"model.path={folder}", "engine.dtype=float32") as served:
        evaluate(served, folder, place)
        assert served.stop() == 0, served.printed
    return {
        kind: sorted(
            map(json.loads, next(place.rglob(f"samples_ours_{kind}_*.jsonl")).open()), key=lambda s: s["doc_id"]
        )
        for kind in ("choice", "generate")
    }


def evaluate(served: Served, folder: Path, place: Path) -> None:
    model = {
        "model": served.model, "base_url": f"{served.url}/v1/completions", "tokenizer": folder,
        "tokenizer_backend": "huggingface", "max_length": 128, "max_retries": 1,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--include_path", str(place),
         "--model_args", ",".join(f"{name}={value}" for name, value in model.items()), "--batch_size", "3",
         "--tasks", "ours_choice,ours_generate", "--output_path", str(place / "out"), "--log_samples"],
        env={**os.environ, "HF_HOME": str(place / "home")}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def oracle(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def rows(ids):
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return tokenizer, rows


def test_loglikelihoods_are_those_of_transformers(samples, oracle):
    tokenizer, rows = oracle
    for (question, choices, _), sample in zip(QUESTIONS, samples["choice"], strict=True):
        for choice, ((got, is_greedy),) in zip(choices, sample["resps"], strict=True):
            start, ids = len(tokenizer.encode(question)), tokenizer.encode(question + choice)
            told = rows(ids)[start - 1 : -1]
            wanted = told.gather(1, told.new_tensor(ids[start:]).long()[:, None]).sum().item()
            assert float(got) == pytest.approx(wanted, abs=1e-4), "float32, as DESIGN allows between two programs"
            assert (str(is_greedy) == "True") == (told.argmax(-1).tolist() == ids[start:])


def test_accuracy_is_that_of_the_loglikelihoods(samples):
    for (_, choices, answer), sample in zip(QUESTIONS, samples["choice"], strict=True):
        scores = [float(got) for ((got, _),) in sample["resps"]]
        assert sample["acc"] == float(scores.index(max(scores)) == answer) and len(scores) == len(choices)


def test_generated_text_is_the_greedy_one_up_to_the_stop_string(samples, oracle):
    tokenizer, rows = oracle
    for (question, _, _), sample in zip(QUESTIONS, samples["generate"], strict=True):
        ids, text = tokenizer.encode(question), ""
        for _ in range(NUM_GENERATED):
            ids.append(int(rows(ids)[-1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
            text += tokenizer.decode(ids[-1:])
        assert sample["resps"] == [[text.partition(UNTIL)[0]]]
