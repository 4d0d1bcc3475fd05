"""Tiny random transformers checkpoints and what transformers itself makes of them: the oracle of this folder."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 97
MAX_LEN = 160
NUM_REQUESTS = 16
NUM_TOKENS = 20


@dataclass(frozen=True)
class Case:
    """A prompt with its greedy continuation and the log-softmax rows that chose it. logprobs [len(tokens), VOCAB]."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor

    @property
    def gap(self) -> float:
        """Smallest distance between the best and the second-best token along the way."""
        best = self.logprobs.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


def save_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=MAX_LEN, initializer_range=0.25,
        eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def save_qwen3(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(6)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=MAX_LEN, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


SAVE = {"llama": save_llama, "qwen3": save_qwen3}


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of 1 to 70 ids; every third shares a prefix of 40 ids with the others that do."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    made = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 17, 30]))]
        made.append(shared + own if i % 3 == 0 else own + [rng.randrange(VOCAB) for _ in range(rng.randrange(40))])
    return made


@torch.inference_mode()
def continuations(folder: Path, prompt_list: list[list[int]], num_tokens: int) -> list[Case]:
    """Greedy continuations by transformers in float32, one prompt at a time and without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cases = []
    for prompt in prompt_list:
        ids, rows = list(prompt), []
        for _ in range(num_tokens):
            row = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            rows.append(row)
            ids.append(int(row.argmax()))
        cases.append(Case(prompt, ids[len(prompt) :], torch.stack(rows)))
    return cases
