"""Tiny random transformers checkpoints and what transformers itself makes of them: the oracle of this folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import torch

VOCAB = 97
MAX_LEN = 160
NUM_REQUESTS = 12
NUM_TOKENS = 20
PIECES = [
    "".join(letters) for letters in chain.from_iterable(product("abc", repeat=length) for length in (1, 2, 3, 4))
][:VOCAB]
"""Text of each token: few letters, so that a stop string may come in many ways across the borders of tokens."""


@dataclass(frozen=True)
class Case:
    """A prompt with its greedy continuation, and the log-softmax rows that say what follows each token but the last.

    rows [len(prompt) + len(tokens) - 1, VOCAB]
    """

    prompt: list[int]
    tokens: list[int]
    rows: torch.Tensor

    @property
    def logprobs(self) -> torch.Tensor:
        """[len(tokens), VOCAB] rows that chose the tokens."""
        return self.rows[len(self.prompt) - 1 :]

    @property
    def prompt_logprobs(self) -> torch.Tensor:
        """[len(prompt) - 1, VOCAB] rows of the prompt's tokens from the second on."""
        return self.rows[: len(self.prompt) - 1]

    @property
    def gap(self) -> float:
        """Smallest distance between the best and the second-best token along the way."""
        best = self.logprobs.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    def stops(self, index: int) -> list[str]:
        """Stop strings that lie across the borders of tokens, at a place that differs with `index`."""
        text = "".join(PIECES[t] for t in self.tokens)
        border = len("".join(PIECES[t] for t in self.tokens[: 4 + 5 * index % (NUM_TOKENS - 5)]))
        return [text[border - 4 : border + 1], text[border - 2 : border + 3]]


def ending(tokens: Sequence[int], stops: Sequence[str], include: bool) -> tuple[list[int], str, str | None]:
    """(token ids, text, stop string) of a continuation that the first of the stop strings ends, by the definition."""
    text = ""
    for count, token in enumerate(tokens, 1):
        text += PIECES[token]
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            at, _, stop = min(found)
            return list(tokens[:count]), text[:at] + stop * include, stop
    return list(tokens), text, None


def save_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=MAX_LEN, initializer_range=0.25,
        eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return add_tokenizer(folder)


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
    return add_tokenizer(folder)


SAVE = {"llama": save_llama, "qwen3": save_qwen3}


def add_tokenizer(folder: Path) -> Path:
    """Texts of PIECES, one behind the other."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
        ids = list(prompt)
        for _ in range(num_tokens):
            rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            ids.append(int(rows[-1].argmax()))
        cases.append(Case(prompt, ids[len(prompt) :], rows))
    return cases
