"""Folders and servers of the tests of the routes: words w0 .. w23, of which each is followed by the next one."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from framework.testing.crafted import save_crafted

from .here import serving

VOCAB, BOS, EOS = 24, 1, 3
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def add_tokenizer(folder):
    words = {f"w{i}": i for i in range(VOCAB)}
    words["<s>"], words["</s>"] = words.pop("w1"), words.pop("w3")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chain_table():
    """Greedy goes from t to t + 1, by a margin of 8."""
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return table


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    return add_tokenizer(
        save_crafted(tmp_path_factory.mktemp("server") / "chain", chain_table(), eos_token_id=EOS, max_len=8192)
    )


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """The same model without a tokenizer."""
    return save_crafted(tmp_path_factory.mktemp("server") / "bare", chain_table(), eos_token_id=EOS, max_len=256)


@pytest.fixture(scope="session")
def here(chain):
    """One server for the tests that leave it as it was."""
    with serving(chain) as running:
        yield running
