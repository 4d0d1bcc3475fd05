"""What the tests of structured output are made of: a tokenizer over bytes, and a grammar known by hand."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from framework.structured.vocabulary import bits_of

SPECIAL = ["<|end|>", "<|stop|>", "</think>"]
END, STOP, THINK_END = range(3)
PADDING = 7  # ids of the model behind those of the tokenizer
MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ("1", "2"), ('"', ":"), ("a", "b")]
SMALL = ("engine.dtype=float32", "engine.max_model_len=96", "scheduler.max_num_seqs=8", "kv_cache.num_blocks=96")


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, *(a + b for a, b in MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


class Counting:
    """A matcher of letters: `length` tokens of 3, 4, 5, then nothing. Written to be broken on purpose."""

    max_rollback = 64

    def __init__(self, length=3, refuses=(), fails_in=None):
        self.taken, self.length, self.refuses, self.fails_in = [], length, set(refuses), fails_in

    def _may_fail(self, method):
        if self.fails_in == method:
            raise RuntimeError(f"{method} is broken")

    def fill(self, row):
        self._may_fail("fill")
        row[:] = bits_of([] if self.is_terminated() else [3, 4, 5], 32 * len(row))

    def accept(self, token_ids):
        self._may_fail("accept")
        if any(token not in (3, 4, 5) or token in self.refuses for token in token_ids):
            return False
        self.taken += token_ids
        return True

    def rollback(self, n):
        assert 0 < n <= len(self.taken)
        del self.taken[len(self.taken) - n :]

    def is_accepting(self):
        return len(self.taken) == self.length

    def is_terminated(self):
        return self.is_accepting()


def ids_of(row):
    """Ids that a mask allows."""
    return np.unpackbits(np.asarray(row).view(np.uint8), bitorder="little").nonzero()[0].tolist()
