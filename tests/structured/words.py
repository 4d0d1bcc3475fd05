"""A grammar of `choice` alone, over lists of texts: as small as a third party's may be, and with faults to plant."""

import json

import numpy as np

from framework.structured.vocabulary import bits_of


class Words:
    """`framework.interfaces.Grammar` of one kind."""

    fault = None

    def __init__(self, options, ctx):
        self.ctx = ctx

    def check(self, spec):
        if spec.kind != "choice":
            raise ValueError(f"serves 'choice' only, not {spec.kind!r}")
        if self.fault != "refuses nothing" and not json.loads(spec.text):
            raise ValueError("has no text to choose from")

    def compile(self, spec):
        return CompiledWords(self, [text.encode() for text in json.loads(spec.text)])


class CompiledWords:
    def __init__(self, grammar, texts):
        self.grammar, self.texts, self.shared = grammar, texts, []

    def matcher(self):
        return WordsMatcher(self.grammar, self.texts, self.shared if self.grammar.fault == "shares its place" else [])


class WordsMatcher:
    def __init__(self, grammar, texts, taken):
        self.ctx, self.fault, self.texts, self.taken = grammar.ctx, grammar.fault, texts, taken

    def _text(self, more=()):
        return b"".join(self.ctx.tokens[i] for i in (*self.taken, *more))

    def _fits(self, text):
        return any(whole.startswith(text) for whole in self.texts)

    def fill(self, row):
        ids = [i for i, piece in enumerate(self.ctx.tokens) if piece and self._fits(self._text([i]))]
        if self.fault == "allows a special token":
            ids.append(min(self.ctx.special_tokens))
        bits = bits_of(ids, self.ctx.vocab_size)
        row[:] = bits | row if self.fault == "leaves the row" else bits
        if self.fault == "writes beside the row":
            np.lib.stride_tricks.as_strided(row, (len(row) + 1,))[-1] = 0

    def accept(self, token_ids):
        for count, token in enumerate(token_ids):
            if self.fault != "accepts anything" and not (self.ctx.tokens[token] and self._fits(self._text([token]))):
                if self.fault != "takes a part" and count:
                    del self.taken[-count:]
                return False
            self.taken.append(token)
        return True

    def rollback(self, n):
        if n > len(self.taken) or (n > self.ctx.max_rollback and self.fault != "has no budget"):
            raise ValueError(f"rollback of {n} tokens")
        del self.taken[len(self.taken) - n + (self.fault == "goes back too little") :]

    def is_accepting(self):
        return self._text() in self.texts

    def is_terminated(self):
        text = self._text()
        if self.fault == "is never over":
            return False
        return self.is_accepting() and not any(whole.startswith(text) and whole != text for whole in self.texts)


FAULTS = (
    "refuses nothing", "shares its place", "allows a special token", "leaves the row", "writes beside the row",
    "accepts anything", "takes a part", "has no budget", "goes back too little", "is never over",
)  # fmt: skip
