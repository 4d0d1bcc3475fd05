"""The contract suite of grammars: what each must do, whoever wrote it, in checks that need no model.

A grammar is tried on those of the case's constraints that it does not refuse, over a vocabulary of bytes, longer
tokens, special tokens and padding. Each function of `CHECKS` takes a `GrammarCase` and raises AssertionError, naming
the grammar, when a duty of `framework.interfaces.Grammar` is broken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from framework.interfaces import Grammar, GrammarContext, GrammarMatcher, GrammarSpec
from framework.testing.checking import Skipped, assert_all

SPECIAL_TOKENS = {256: "<|end|>", 257: "<|tool|>"}
LONGER = (
    b"12",
    b"-a",
    b"a-",
    b"3-f",
    b"-ab",
    b"00000",
    "é".encode(),
    b"true",
    b'{"',
    b'":',
    b'"}',
    b"yes",
    b"no",
    b"aa",
)
PADDING = 5
SPECS = (
    GrammarSpec("regex", "[0-9]+(-[a-f]{1,2})?"),
    GrammarSpec("choice", '["yes", "no", "yes or no", "é"]'),
    GrammarSpec("json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    GrammarSpec("json_object", ""),
    GrammarSpec("grammar", 'root ::= "(" root ")" | "x"'),
)
REFUSED = (GrammarSpec("regex", "a("), GrammarSpec("json", '{"type": "nothing"}'), GrammarSpec("grammar", "root ::= x"))
NUM_PLACES, NUM_WALKS = 10, 4


@dataclass(frozen=True)
class GrammarCase:
    """specs: constraints to try, those that the grammar refuses are passed over; refused: no sense is in these."""

    target: Any
    options: Any = field(default_factory=dict)
    specs: tuple[GrammarSpec, ...] = SPECS
    refused: tuple[GrammarSpec, ...] = REFUSED

    @property
    def name(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    def made(self, **changes: Any) -> Grammar:
        grammar: Grammar = self.target(self.options, context(**changes))
        return grammar

    def served(self, grammar: Grammar) -> list[GrammarSpec]:
        served = [spec for spec in self.specs if _reason(grammar, spec) is None]
        assert served, f"{self.name}: refuses every constraint of the case: {_reason(grammar, self.specs[0])}"
        return served

    def matchers(self) -> Iterator[tuple[str, GrammarMatcher]]:
        """(what messages call it, a new matcher) of each constraint that is served."""
        grammar = self.made()
        for spec in self.served(grammar):
            yield f"{self.name}, {spec.kind} {spec.text}", grammar.compile(spec).matcher()


def context(**changes: Any) -> GrammarContext:
    """The vocabulary of the suite: ids 0 to 255 are bytes."""
    tokens = [bytes([b]) for b in range(256)] + [b""] * len(SPECIAL_TOKENS) + [*LONGER] + [b""] * PADDING
    return GrammarContext(tokens, SPECIAL_TOKENS, lambda text: list(text.encode()), **changes)


_CONTEXT = context()
_SILENT = {i for i, text in enumerate(_CONTEXT.tokens) if not text}


def mask_of(matcher: GrammarMatcher) -> set[int]:
    """Ids of the suite's vocabulary that the matcher allows. Bits behind the vocabulary say nothing."""
    row = np.full(-(-_CONTEXT.vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: _CONTEXT.vocab_size]
    return {int(i) for i in bits.nonzero()[0]}


def _reason(grammar: Grammar, spec: GrammarSpec) -> str | None:
    """Why the grammar refuses the constraint, None when it serves it."""
    try:
        grammar.check(spec)
    except ValueError as error:
        return str(error)
    return None


def _walk(matcher: GrammarMatcher, seed: int = 0) -> Iterator[set[int]]:
    """Masks at the places of a random text, whose next token is taken behind each."""
    draw = random.Random(seed)
    for _ in range(NUM_PLACES):
        allowed = mask_of(matcher)
        yield allowed
        if not allowed:
            return
        longest = max(len(_CONTEXT.tokens[i]) for i in allowed)
        best = [i for i in sorted(allowed) if len(_CONTEXT.tokens[i]) in (1, longest)]
        assert matcher.accept((draw.choice(best),)), "a token that the mask allows is refused"


def check_is_a_grammar(case: GrammarCase) -> None:
    """It has the methods of the contract, and serves one of the constraints."""
    grammar = case.made()
    assert isinstance(grammar, Grammar), f"{case.name}: lacks check or compile"
    case.served(grammar)


def check_masks_say_what_is_accepted(case: GrammarCase) -> None:
    """Every id that a mask allows is accepted, and no other one, but for other spellings of a text that is forced; what
    was tried is taken back."""
    for name, matcher in case.matchers():
        for allowed in _walk(matcher):
            for i in sorted(set(range(_CONTEXT.vocab_size)) - _SILENT):
                accepted = matcher.accept((i,))
                is_forced = len(allowed) == 1 and accepted
                agrees = accepted == (i in allowed) or is_forced
                assert agrees, f"{name}: id {i} allowed: {i in allowed}, accepted: {accepted}"
                if accepted:
                    matcher.rollback(1)


def check_ids_without_text_are_never_allowed(case: GrammarCase) -> None:
    """Special tokens, eos and padding: the engine decides where a request may end."""
    for name, matcher in case.matchers():
        for allowed in _walk(matcher):
            assert not allowed & _SILENT, f"{name}: allows ids without text: {sorted(allowed & _SILENT)}"


def check_row_is_overwritten(case: GrammarCase) -> None:
    """A mask does not depend on what the row held, and nothing beside the row is written."""
    for name, matcher in case.matchers():
        rows = np.full((3, -(-_CONTEXT.vocab_size // 32)), 7, np.int32)
        matcher.fill(rows[1])
        other = np.zeros_like(rows[1])
        matcher.fill(other)
        assert (rows[[0, 2]] == 7).all(), f"{name}: fill writes beside its row"
        assert (rows[1] == other).all(), f"{name}: fill leaves parts of its row as they were"


def check_rollback_restores_the_mask(case: GrammarCase) -> None:
    """After n tokens are taken back, the mask is the one before them (CASES C16)."""
    for name, matcher in case.matchers():
        seen = [
            allowed for allowed in _walk(matcher) if allowed
        ]  # behind the last one of a whole text nothing is taken
        for expected in reversed(seen):
            matcher.rollback(1)
            assert mask_of(matcher) == expected, f"{name}: rollback does not bring back the mask before"


def check_tokens_are_taken_together(case: GrammarCase) -> None:
    """Of several tokens all are taken or none."""
    for name, matcher in case.matchers():
        before = mask_of(matcher)
        first = min(before)
        assert matcher.accept((first,)), f"{name}: refuses id {first}, which it allows"
        wrong = min(set(range(256)) - mask_of(matcher))
        matcher.rollback(1)
        assert not matcher.accept((first, wrong)), f"{name}: accepts id {wrong}, which it does not allow"
        assert mask_of(matcher) == before, f"{name}: a refusal leaves a part of the tokens taken"


def check_rollback_beyond_the_budget_is_refused(case: GrammarCase) -> None:
    """ValueError for more than was taken, and for more than max_rollback; nothing changes."""
    grammar = case.made(max_rollback=2)
    matcher = grammar.compile(case.served(grammar)[0]).matcher()
    for num_taken, allowed in enumerate(_walk(matcher)):
        for count in {num_taken + 1, max(3, num_taken)}:
            try:
                matcher.rollback(count)
            except ValueError:
                pass
            else:
                raise AssertionError(f"{case.name}: takes back {count} of {num_taken} tokens with max_rollback=2")
            assert mask_of(matcher) == allowed, f"{case.name}: a refused rollback changes the mask"


def check_end_is_told(case: GrammarCase) -> None:
    """is_terminated holds where the text is whole and no token may follow; somewhere a text is whole."""
    for name, matcher, seed in ((*one, seed) for seed in range(NUM_WALKS) for one in case.matchers()):
        for allowed in _walk(matcher, seed):
            is_over = matcher.is_accepting() and not allowed
            assert matcher.is_terminated() == is_over, f"{name}: is_terminated is {not is_over} at the wrong place"
            assert allowed or matcher.is_accepting(), f"{name}: nothing may follow a text that is not whole"


def check_matchers_are_apart(case: GrammarCase) -> None:
    """Two requests of one compilation do not see each other's tokens."""
    grammar = case.made()
    compiled = grammar.compile(case.served(grammar)[0])
    one, two = compiled.matcher(), compiled.matcher()
    before = mask_of(two)
    list(_walk(one))
    assert mask_of(two) == before, f"{case.name}: matchers of one compilation share their place"


def check_compiles_in_threads(case: GrammarCase) -> None:
    """Compilations run beside each other, and beside checks."""
    grammar = case.made()
    served = case.served(grammar)
    expected = [mask_of(grammar.compile(spec).matcher()) for spec in served]
    with ThreadPoolExecutor(4) as threads:
        compiled = [threads.submit(grammar.compile, spec) for spec in served * 4]
        for spec in served * 4:
            grammar.check(spec)
        got = [mask_of(future.result().matcher()) for future in compiled]
    assert got == expected * 4, f"{case.name}: compilations that run at a time disturb each other"


def check_nonsense_is_refused_with_a_reason(case: GrammarCase) -> None:
    """A ValueError of `check`, which says what is wrong: it is what the caller reads."""
    grammar = case.made()
    kinds = {spec.kind for spec in case.served(grammar)}
    tried = [spec for spec in case.refused if spec.kind in kinds]
    if not tried:
        raise Skipped("no constraint without sense is known of the kinds that it serves")
    for spec in tried:
        reason = _reason(grammar, spec)
        assert reason is not None, f"{case.name}: serves {spec.kind} {spec.text!r}, which makes no sense"
        assert len(reason) > 5, f"{case.name}: refuses {spec.kind} {spec.text!r} without a reason"


CHECKS = (
    check_is_a_grammar,
    check_masks_say_what_is_accepted,
    check_ids_without_text_are_never_allowed,
    check_row_is_overwritten,
    check_rollback_restores_the_mask,
    check_tokens_are_taken_together,
    check_rollback_beyond_the_budget_is_refused,
    check_end_is_told,
    check_matchers_are_apart,
    check_compiles_in_threads,
    check_nonsense_is_refused_with_a_reason,
)


def check_grammar(case: GrammarCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
