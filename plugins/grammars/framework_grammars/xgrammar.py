"""Grammar `xgrammar`: masks by mlc-ai/xgrammar, over the token bytes that the engine gives.

The library knows no id that ends a request here: the engine adds those. Which JSON Schemas it would read with parts
left out is in `schema_words`, and these are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.interfaces import CompiledGrammar, GrammarContext, GrammarSpec
from framework_grammars.rollback import CountedMatcher
from framework_grammars.schema_words import refuse_ignored, refuse_ignored_in_tags, refuse_misread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_grammars.options import XGrammarOptions

_SOURCE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Check failed: .*? is false: )?")
"""How the library's messages begin: time, file and condition, which help no caller."""
_COUNTED, _COUNTED_OF_JSON = r"[^\"\\\r\n]", r"[^\"\\\0-\x1f]"
"""Characters of strings whose length counts: the library's, which let control characters through, and those of JSON."""
_WITH_SCHEMA = ("json", "structural_tag")


class XGrammar:
    """`framework.interfaces.Grammar`."""

    def __init__(self, options: XGrammarOptions, ctx: GrammarContext) -> None:
        import xgrammar

        self._xgrammar, self._options, self._ctx = xgrammar, options, ctx
        tokens = xgrammar.TokenizerInfo(
            list(ctx.tokens), xgrammar.VocabType.RAW, vocab_size=ctx.vocab_size, stop_token_ids=[]
        )
        # The engine keeps what it compiles by itself.
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=options.max_threads, cache_enabled=False)

    def check(self, spec: GrammarSpec) -> None:
        self._parsed(spec)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        parsed = self._parsed(spec)
        with _reasons():
            compiled = self._compiler.compile_grammar(parsed)
        return _Compiled(lambda: self._xgrammar.GrammarMatcher(compiled), self._ctx)

    def _parsed(self, spec: GrammarSpec) -> Any:
        """The library's own form of the constraint. ValueError with its reason."""
        if spec.kind == "json":
            refuse_ignored(json.loads(spec.text))
        elif spec.kind == "structural_tag":
            refuse_ignored_in_tags(json.loads(spec.text))
        elif spec.kind == "regex":
            refuse_misread(spec.text)
        with _reasons():
            return self._without_controls(self._parse(spec)) if spec.kind in _WITH_SCHEMA else self._parse(spec)

    def _without_controls(self, parsed: Any) -> Any:
        """The grammar, with no character in strings of JSON that JSON forbids there."""
        text = str(parsed)
        if _COUNTED not in text:
            return parsed
        return self._xgrammar.Grammar.from_ebnf(legible(text).replace(_COUNTED, _COUNTED_OF_JSON))

    def _parse(self, spec: GrammarSpec) -> Any:
        grammar, text = self._xgrammar.Grammar, spec.text
        if spec.kind == "json":
            return self._json(text, self._options.strict)
        if spec.kind == "json_object":
            return self._json('{"type": "object"}', strict=False)
        if spec.kind == "regex":
            return grammar.from_regex(text)
        if spec.kind == "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return grammar.from_ebnf(f"root ::= {' | '.join(texts)}")
        if spec.kind == "grammar":
            return grammar.from_ebnf(text)
        return grammar.from_structural_tag(text)

    def _json(self, schema: str, strict: bool) -> Any:
        return self._xgrammar.Grammar.from_json_schema(
            schema, any_whitespace=self._options.any_whitespace, strict_mode=strict
        )


def legible(printed: str) -> str:
    """A grammar as the library prints it, so that it reads the same again: in `\\xdfe` it takes the e for a digit."""
    return re.sub(r"\\(?:\\|x([0-9a-f]{2}))", lambda m: rf"\u00{m[1]}" if m[1] else m[0], printed)


@contextmanager
def _reasons() -> Iterator[None]:
    """The library's errors as ValueErrors, without the places in its sources that they begin with."""
    try:
        yield
    except RuntimeError as error:
        text = _SOURCE.sub("", str(error).strip())
        raise ValueError(text or "it cannot be read, and the library does not say why") from error


class _Compiled:
    def __init__(self, make: Callable[[], Any], ctx: GrammarContext) -> None:
        self._make, self._ctx = make, ctx

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._make(), self._ctx.vocab_size, self._ctx.max_rollback)


class XGrammarMatcher(CountedMatcher):
    """`framework.interfaces.GrammarMatcher`."""

    def __init__(self, matcher: Any, vocab_size: int, max_rollback: int) -> None:
        super().__init__(matcher, max_rollback)
        self._num_words = -(-vocab_size // 32)
        self._last_word = np.uint32((1 << ((vocab_size - 1) % 32 + 1)) - 1).view(np.int32)

    def fill(self, row: NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)
        row[-1] &= self._last_word  # the library sets bits behind the vocabulary

    def accept(self, token_ids: Sequence[int]) -> bool:
        for count, token in enumerate(token_ids):
            if not self._matcher.accept_token(token):
                self._matcher.rollback(count)
                return False
        self._num_taken += len(token_ids)
        return True

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_terminated(self) -> bool:
        if not self._matcher.is_completed():
            return False
        row = np.zeros(self._num_words, np.int32)
        self.fill(row)
        return not row.any()
