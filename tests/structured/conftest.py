"""A crafted model over bytes for the tests of structured output, and a vocabulary of letters."""

import pytest
import torch

from framework.structured.vocabulary import Vocabulary, bits_of
from framework.testing.crafted import save_crafted

from .crafted import END, PADDING, STOP, byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Random logits that like digits, quotes and brackets; eos are <|end|> and <|stop|>."""
    backend = byte_tokenizer()
    size = backend.get_vocab_size() + PADDING
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(3)) * 2
    for text in '0123456789"}]':
        table[:, backend.token_to_id(text)] += 3.0
    table[:, -PADDING:] += 9.0  # what must never be drawn is what the model likes best
    path = save_crafted(tmp_path_factory.mktemp("structured") / "bytes", table, eos_token_id=[END, STOP])
    backend.save(str(path / "tokenizer.json"))
    return str(path)


@pytest.fixture
def vocabulary():
    """40 ids: 0 to 2 are special, 39 is padding."""
    tokens = [b"", b"", b"", *(bytes([65 + i]) for i in range(36)), b""]
    return Vocabulary(tokens, bits_of(range(39), 40), None)
