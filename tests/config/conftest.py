"""What a command line of some words would run."""

import pytest

from framework.composing import load, parts_of, search_roots
from framework.words import Vocabulary, command_words


@pytest.fixture
def command_line():
    """(Config, run, RunArgs) of words without flags, composed as the command line composes them."""

    def composed(*words):
        roots = search_roots()
        return parts_of(load(command_words(words, Vocabulary.read(roots)), roots))

    return composed
