"""The grammar of an engine: built for the first request that needs one, and asked at admission.

Checks run on the caller's thread, compilations beside the steps. What a request does with its grammar is in
`framework.structured.constraint`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from framework.errors import FrameworkError, PluginError, RequestError
from framework.interfaces import Grammar, GrammarContext
from framework.structured.compiling import Compiler
from framework.structured.constraint import Constraint
from framework.structured.spec import kind_of, spec_of
from framework.structured.vocabulary import read

if TYPE_CHECKING:
    from framework.request import SamplingParams
    from framework.structured.vocabulary import Vocabulary
    from framework.tokenizer import Tokenizer


class NoGrammars:
    """In the place of `Grammars` where an engine has none. reason: why, and what to do about it."""

    name = "none"
    is_built = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def check(self, params: SamplingParams) -> None:
        """RequestError for a request that has a constraint."""
        if params.structured_outputs is not None:
            kind = kind_of(params.structured_outputs)
            raise RequestError(f"structured_outputs.{kind} cannot be served: {self._reason}")

    def constraint(
        self, params: SamplingParams, eos_token_ids: frozenset[int], prompt_token_ids: Sequence[int]
    ) -> Constraint | None:
        return None

    def build(self) -> None:
        """There is nothing to build."""

    def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class Setting:
    """Where a grammar works. eos_token_ids: of the checkpoint; think_end: id behind which grammars hold, or None."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    think_end: int | None


class Grammars:
    """The grammar `name`, made by `build`. label: the plugin as messages call it; max_kept: compilations kept."""

    def __init__(
        self, name: str, label: str, build: Callable[[GrammarContext], Grammar], setting: Setting, max_kept: int
    ) -> None:
        self.name = name
        self._label, self._make, self._setting, self._max_kept = label, build, setting, max_kept
        self._compiler: Compiler | None = None
        self._building = threading.Lock()

    @property
    def is_built(self) -> bool:
        return "_grammar" in vars(self)

    def build(self) -> None:
        """Makes the grammar, which may take seconds, on any thread. What goes wrong is told by `check`, which comes to
        the same."""
        with self._building, suppress(Exception):
            _ = self._grammar

    def check(self, params: SamplingParams) -> None:
        """RequestError, with the grammar's own reason, for a constraint that it cannot serve."""
        asked = params.structured_outputs
        if asked is None:
            return
        spec = spec_of(asked)
        if self._setting.think_end in (params.stop_token_ids or ()):
            raise RequestError(
                f"stop_token_ids holds {self._setting.think_end}, grammar.reasoning_end: structured_outputs."
                f"{spec.kind} begins behind it, and could never be. Leave it out"
            )
        if self._compiler is not None and self._compiler.knows(spec):
            return
        try:
            self._grammar.check(spec)
        except FrameworkError:
            raise
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise RequestError(f"structured_outputs.{spec.kind}: grammar={self.name} refuses it: {reason}") from error
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise PluginError(f"{self._label} raised in check: {what}") from error

    def constraint(
        self, params: SamplingParams, eos_token_ids: frozenset[int], prompt_token_ids: Sequence[int]
    ) -> Constraint | None:
        """The constraint of a checked request, whose compilation begins now; None for a request without one.

        eos_token_ids  those that end this request
        """
        if params.structured_outputs is None:
            return None
        spec = spec_of(params.structured_outputs)
        if self._compiler is None:
            self._compiler = Compiler(self._grammar.compile, self._max_kept)
        return Constraint(
            self._compiler.ask(spec),
            self._vocabulary,
            f"{self._label}, structured_outputs.{spec.kind},",
            eos_token_ids.union(params.stop_token_ids or ()),
            params.min_tokens,
            self._think_end(prompt_token_ids),
        )

    def _think_end(self, prompt_token_ids: Sequence[int]) -> int | None:
        """None as well for a prompt whose last turn has closed the thinking already."""
        think_end, ends = self._setting.think_end, self._setting.eos_token_ids
        for token in reversed(prompt_token_ids if think_end is not None else ()):
            if token == think_end:
                return None
            if token in ends:
                break
        return think_end

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        s = self._setting
        return read(s.tokenizer, s.vocab_size, s.eos_token_ids)

    @cached_property
    def _grammar(self) -> Grammar:
        tokenizer = self._setting.tokenizer
        ctx = GrammarContext(
            tokens=self._vocabulary.tokens,
            special_tokens=_names(tokenizer, tokenizer.special_ids, self._setting.vocab_size),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
        return self._make(ctx)


def _names(tokenizer: Tokenizer, ids: Collection[int], vocab_size: int) -> dict[int, str]:
    return {i: tokenizer.decode_token(i) for i in sorted(ids) if i < vocab_size}
