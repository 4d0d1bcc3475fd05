"""Expressions that xgrammar reads otherwise than written: each refusal is needed, and what passes is kept to."""

import re
from itertools import product

import pytest

from framework.interfaces import GrammarSpec
from framework_grammars.options import XGrammarOptions
from framework_grammars.regex_words import objections
from framework_grammars.xgrammar import XGrammar

from .automata import context

TEXTS = ["".join(letters) for n in range(4) for letters in product("abA", repeat=n)]


@pytest.fixture(scope="module")
def matched():
    """Texts that the library alone, without our refusals, takes for whole ones of an expression."""
    grammar = XGrammar(XGrammarOptions(), context())

    def texts(pattern):
        compiled = grammar._compiler.compile_grammar(grammar._parse(GrammarSpec("regex", pattern)))
        found = []
        for text in TEXTS:
            matcher = grammar._xgrammar.GrammarMatcher(compiled)
            if all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed():
                found.append(text)
        return found

    return texts


def by_python(pattern):
    return [text for text in TEXTS if re.fullmatch(pattern, text)]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("a^b", "'^' in the middle"), ("a$b", "'$' in the middle"), (r"\Aa", r"'\A' is read as the letter"),
     (r"a\Z", r"'\Z' is read as the letter")],
)  # fmt: skip
def test_part_that_the_library_reads_otherwise_is_refused(matched, pattern, message):
    assert matched(pattern) != by_python(pattern)
    assert message in next(objections(pattern, in_json=False))


@pytest.mark.parametrize(
    "pattern",
    ["^ab$", "a|b", "^a|b$", "^(a|b)$", "(^a$)|b", "^^a$$", "(?:^a)b", "[a^$]b", r"\^|a", r"\$?b", "[^a]", r"[\]A]?",
     "a{0,2}", "a*?b", r"\w\W?", r"\u0061\x62", "(?:ab)+", "(a|b)*A", ""],
)  # fmt: skip
def test_part_that_the_library_reads_as_written_is_not_refused(matched, pattern):
    assert list(objections(pattern, in_json=False)) == []
    if pattern:
        assert matched(pattern) == by_python(pattern)


@pytest.mark.parametrize("pattern", ["a(?=b)", "(?!a)b", "(?<=a)b", "(?<!a)b"])
def test_looking_around_is_refused(pattern):
    assert "looking around" in next(objections(pattern, in_json=True))
