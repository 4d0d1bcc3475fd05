"""A vocabulary of words for crafted models: texts are ids that a person can read."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB, BOS, EOS = 24, 1, 3


def add_tokenizer(folder, chat_template):
    """Words w0 .. w23 between spaces; <s> (1) is put before every text, </s> (3) is eos."""
    words = {f"w{i}": i for i in range(VOCAB)}
    words["<s>"], words["</s>"] = words.pop("w1"), words.pop("w3")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chain_table():
    """Greedy goes from t to t + 1, by a margin of 8."""
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return table
