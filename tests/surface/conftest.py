"""Folders and engines of the tests from outside: crafted models, a small tokenizer, the command line."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from framework import LLM
from framework.testing.crafted import save_crafted

VOCAB, BOS, EOS = 24, 1, 3
SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=8", "kv_cache.num_blocks=64")


def add_tokenizer(folder):
    """Words w0 .. w23 between spaces; <s> (1) is put before every text, </s> (3) is eos."""
    words = {f"w{i}": i for i in range(VOCAB)}
    words["<s>"], words["</s>"] = words.pop("w1"), words.pop("w3")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'][0] | replace('u', 'w5') }} {{ m['content'] }} {% endfor %}w9"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chain_table():
    """Greedy goes from t to t + 1, by a margin of 8."""
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return table


def mixed_table():
    """Logits without ties, so that every token has a rank of its own."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`chain` and `mixed` have a tokenizer, `bare` is `mixed` without one. Their eos is 3."""
    root = tmp_path_factory.mktemp("surface")
    made = {"chain": chain_table(), "mixed": mixed_table(), "bare": mixed_table()}
    paths = {name: save_crafted(root / name, table, eos_token_id=EOS) for name, table in made.items()}
    add_tokenizer(paths["chain"])
    add_tokenizer(paths["mixed"])
    return paths


@pytest.fixture(scope="module", params=["sync", "async"])
def steps(request):
    """Each sentence holds a step at a time and with steps in flight."""
    return f"engine.async_scheduling={str(request.param == 'async').lower()}"


@pytest.fixture(scope="module")
def chain(folders, steps):
    with LLM(folders["chain"], overrides=[*SMALL, steps]) as llm:
        yield llm


@pytest.fixture(scope="module")
def mixed(folders, steps):
    with LLM(folders["mixed"], overrides=[*SMALL, steps]) as llm:
        yield llm


@pytest.fixture
def command(tmp_path):
    """Runs `python -m framework WORDS` in an empty folder; stdout and stderr are bytes."""

    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "framework", *words], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
        )  # fmt: skip

    return run
