"""Tokenizers of every kind, written by hand: what texts and pieces are tried on."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from framework import tokenizer as framework_tokenizer

SPECIAL = ["<s>", "</s>", "<unk>"]
LETTERS = [chr(c) for c in range(0x21, 0x7F)]


def vocabulary(*parts):
    """{token: id}, the special ones first, each once."""
    tokens = dict.fromkeys([*SPECIAL, *(token for part in parts for token in part)])
    return {token: i for i, token in enumerate(tokens)}


def byte_level():
    """As of GPT-2; 😀 is of four tokens, é of two or of one."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("Ġ", "Ã"), ("o", "Ã"), ("ð", "Ł")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = vocabulary(alphabet, (a + b for a, b in merges))
    backend = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("東京", normalized=False)])
    return backend


def byte_fallback():
    """As of Llama 2: spaces are letters, and what the vocabulary lacks is spelled in bytes."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = vocabulary(names, ["▁the", "▁quick", "fox", "▁", "▁is", "n't", "é", "▁'"], LETTERS)
    backend = Tokenizer(models.Unigram([(t, -float(i)) for t, i in tokens.items()], unk_id=2, byte_fallback=True))
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def metaspace():
    """As of T5: spaces are letters, and what the vocabulary lacks is unknown."""
    tokens = vocabulary(["▁the", "▁quick", "▁", "fox", "n't", "東京", "é", "😀"], LETTERS)
    backend = Tokenizer(models.Unigram([(t, -float(i)) for t, i in tokens.items()], unk_id=2))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece():
    """As of BERT: pieces behind the first one of a word begin with ##."""
    tokens = vocabulary(["the", "fox", "é", "東京", "##😀"], LETTERS, (f"##{letter}" for letter in [*LETTERS, "é"]))
    backend = Tokenizer(models.WordPiece(tokens, unk_token="<unk>"))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def word_ends():
    """As of the first GPT: the last piece of a word bears its end, which is a space when another word follows."""
    merges = [("t", "h"), ("th", "e</w>"), ("o", "x</w>")]
    ends = [f"{letter}</w>" for letter in [*LETTERS, "é"]]
    tokens = vocabulary(LETTERS, "é", ends, (a + b for a, b in merges))
    backend = Tokenizer(models.BPE(vocab=tokens, merges=merges, end_of_word_suffix="</w>", unk_token="<unk>"))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    return backend


def words():
    """No decoder: words between spaces."""
    backend = Tokenizer(models.WordLevel(vocabulary(["the", "fox", "é", "😀"], LETTERS), "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    return backend


MAKERS = {
    "byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_piece": word_piece,
    "word_piece_cleaned": word_piece, "word_ends": word_ends, "words": words,
}  # fmt: skip


@functools.cache
def made(name):
    """The framework's tokenizer of this kind."""
    return framework_tokenizer.Tokenizer(MAKERS[name](), {}, clean_up_spaces=name.endswith("cleaned"))
