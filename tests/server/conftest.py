"""Folders and servers of the tests of the routes: words w0 .. w23, of which each is followed by the next one."""

import pytest

from framework.testing.crafted import save_crafted

from ..word_model import EOS, add_tokenizer, chain_table
from .here import serving

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    folder = save_crafted(tmp_path_factory.mktemp("server") / "chain", chain_table(), eos_token_id=EOS, max_len=8192)
    return add_tokenizer(folder, TEMPLATE)


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """The same model without a tokenizer."""
    return save_crafted(tmp_path_factory.mktemp("server") / "bare", chain_table(), eos_token_id=EOS, max_len=256)


@pytest.fixture(scope="session")
def here(chain):
    """One server for the tests that leave it as it was."""
    with serving(chain) as running:
        yield running
