"""Both grammars: their masks against an automaton by hand, every kind of constraint, going back, refusals."""

import json
import random

import numpy as np
import pytest

from framework.interfaces import Grammar, GrammarSpec
from framework_grammars.llguidance import LLGuidance
from framework_grammars.options import LLGuidanceOptions, XGrammarOptions
from framework_grammars.xgrammar import XGrammar, legible

from .automata import Automaton, context, mask_of

MAKERS = {"xgrammar": (XGrammar, XGrammarOptions), "llguidance": (LLGuidance, LLGuidanceOptions)}
CTX = context(max_rollback=8)


@pytest.fixture(scope="module", params=MAKERS)
def name(request):
    return request.param


def made(name, **options):
    target, own = MAKERS[name]
    return target(own(**options), CTX)


@pytest.fixture(scope="module")
def grammar(name):
    return made(name)


def matcher_of(grammar, kind, text=""):
    spec = GrammarSpec(kind, text)
    grammar.check(spec)
    return grammar.compile(spec).matcher()


def fits(grammar, kind, constraint, text):
    """Whether the text, a byte at a time, is a whole one of the constraint."""
    matcher = matcher_of(grammar, kind, constraint)
    return all(matcher.accept((byte,)) for byte in text.encode()) and matcher.is_accepting()


def test_it_is_a_grammar(grammar):
    assert isinstance(grammar, Grammar)


# -------------------------------------------------------------------------------- masks against an automaton


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_a_random_walk_are_those_of_the_automaton(grammar, seed):
    automaton, matcher, draw = Automaton(), matcher_of(grammar, "regex", Automaton.regex), random.Random(seed)
    state = "start"
    for _ in range(8):
        allowed = automaton.allowed(state, CTX.tokens)
        assert mask_of(matcher, CTX.vocab_size) == allowed, state
        assert matcher.is_accepting() == (state in automaton.accepting)
        assert matcher.is_terminated() == (state == "two")
        if not allowed:
            return
        token = draw.choice(sorted(allowed))
        assert matcher.accept((token,))
        state = automaton.run(state, CTX.tokens[token])


def test_every_token_that_is_allowed_is_accepted_and_no_other(grammar):
    matcher = matcher_of(grammar, "regex", Automaton.regex)
    allowed = mask_of(matcher, CTX.vocab_size)
    for token in (*sorted(allowed), *range(ord("a"), ord("f"))):
        assert matcher.accept((token,)) == (token in allowed)
        if token in allowed:
            matcher.rollback(1)
    assert mask_of(matcher, CTX.vocab_size) == allowed


def test_ids_without_text_are_never_allowed(grammar):
    matcher = matcher_of(grammar, "regex", r"(.|\n)*")
    silent = {i for i, text in enumerate(CTX.tokens) if not text}
    assert not mask_of(matcher, CTX.vocab_size) & silent


def test_matchers_of_one_compilation_are_apart(grammar):
    compiled = grammar.compile(GrammarSpec("regex", "ab"))
    one, two = compiled.matcher(), compiled.matcher()
    assert one.accept((ord("a"), ord("b"))) and one.is_terminated()
    assert mask_of(two, CTX.vocab_size) == {ord("a")}


# ------------------------------------------------------------------------------------------- going back (C16)


def test_case_c16_allowed_ids_after_a_rollback_are_those_before(grammar):
    matcher = matcher_of(grammar, "json", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    seen, text = [], b'{"a": 12}'
    for byte in text:
        seen.append(mask_of(matcher, CTX.vocab_size))
        assert matcher.accept((byte,))
    assert matcher.is_terminated()
    for byte in reversed(text[-8:]):
        matcher.rollback(1)
        assert mask_of(matcher, CTX.vocab_size) == seen.pop() and matcher.accept((byte,))
        matcher.rollback(1)


def test_tokens_that_do_not_fit_together_are_not_taken_at_all(grammar):
    matcher = matcher_of(grammar, "regex", "abc")
    assert not matcher.accept((ord("a"), ord("b"), ord("x")))
    assert mask_of(matcher, CTX.vocab_size) == {ord("a")}


@pytest.mark.parametrize(
    ("taken", "back", "message"),
    [(3, 4, "rollback of 4 tokens, but the matcher has taken 3"),
     (12, 9, r"rollback of 9 tokens, but at most 8 can be taken back \(max_rollback\)")],
)  # fmt: skip
def test_case_c16_more_than_the_budget_is_a_clear_error_and_changes_nothing(grammar, taken, back, message):
    matcher = matcher_of(grammar, "regex", "[0-9]+x")
    assert matcher.accept([ord("1")] * taken)
    before = mask_of(matcher, CTX.vocab_size)
    with pytest.raises(ValueError, match=message):
        matcher.rollback(back)
    assert mask_of(matcher, CTX.vocab_size) == before


# ------------------------------------------------------------------------------------------ kinds of constraint


CHOICES = json.dumps(["yes", "no", 'a "quote"', "back\\slash", "zwei\nZeilen", "é😀"], ensure_ascii=False)
TAG = {"type": "triggered_tags", "triggers": ["<f"],
       "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                 "end": "</f>"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "constraint", "good", "bad"),
    [
        ("json", '{"type": "array", "items": {"type": "integer"}}', "[1, 2]", '["a"]'),
        ("json_object", "", '{"any": [1, {"thing": null}]}', "[1]"),
        ("regex", "a{2}|b", "aa", "a"),
        ("choice", CHOICES, "zwei\nZeilen", "maybe"),
        ("choice", CHOICES, "é😀", "é"),
        ("choice", CHOICES, 'a "quote"', "ye"),
        ("choice", CHOICES, "back\\slash", "yesno"),
        ("grammar", 'root ::= "(" root ")" | "x"', "((x))", "((x)"),
        ("structural_tag", json.dumps({"type": "structural_tag", "format": TAG}), "so <f=a>12</f> it is", "<f=a>x</f>"),
    ],
)
def test_text_of_the_constraint_fits_and_another_does_not(grammar, kind, constraint, good, bad):
    assert fits(grammar, kind, constraint, good)
    assert not fits(grammar, kind, constraint, bad)


def test_json_without_whitespace_is_an_option(name):
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    assert fits(made(name), "json", schema, '{\n  "a":   1}')
    assert not fits(made(name, any_whitespace=False), "json", schema, '{\n  "a":   1}')


def test_schema_that_names_no_others_allows_none_unless_strict_is_off():
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    text = '{"a": 1, "b": 2}'
    assert not fits(made("xgrammar"), "json", schema, text)
    assert fits(made("xgrammar", strict=False), "json", schema, text)
    assert fits(made("llguidance"), "json", schema, text)


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [("json", '{"type": "strin"}'), ("regex", "a("), ("grammar", "root ::= nowhere"), ("json", '{"$ref": "#/nowhere"}'),
     ("structural_tag", '{"a": 1}'), ("regex", "a(?=b)"), ("json", '{"type": "array", "uniqueItems": true}'),
     ("json", '{"const": 1' + 400 * "0" + "}"), ("regex", "a\ud800"), ("json", '{"type": "integer", "minimum": "a"}'),
     ("json", '{"items":' * 300 + "{}" + "}" * 300)],
)  # fmt: skip
def test_constraint_that_cannot_be_served_is_refused_with_a_reason(grammar, kind, constraint):
    with pytest.raises(ValueError, match=r"\w{4,}") as caught:
        grammar.check(GrammarSpec(kind, constraint))
    assert ".cc" not in str(caught.value) and not str(caught.value).startswith("[")


@pytest.mark.parametrize(
    ("form", "message"),
    [({"type": "any_text"}, "triggered_tags"), ({**TAG, "at_least_one": True}, "triggered_tags"),
     ({**TAG, "triggers": ["<g"]}, "no trigger begins the tag"),
     ({**TAG, "tags": [{**TAG["tags"][0], "content": {"type": "any_text"}}]}, "'json_schema' in llguidance")],
)  # fmt: skip
def test_llguidance_names_the_structural_tags_that_it_cannot_serve(form, message):
    with pytest.raises(ValueError, match=message):
        made("llguidance").check(GrammarSpec("structural_tag", json.dumps({"format": form})))


def test_llguidance_serves_a_special_token_that_the_grammar_asks_for_by_name():
    matcher = matcher_of(made("llguidance"), "grammar", 'start: "a" <|tool|> "b"')
    assert matcher.accept((ord("a"),)) and mask_of(matcher, CTX.vocab_size) == {257}


def test_masks_are_written_into_a_row_of_a_larger_array(grammar):
    masks = np.full((3, -(-CTX.vocab_size // 32)), 7, np.int32)
    matcher_of(grammar, "regex", "a").fill(masks[1])
    assert (masks[[0, 2]] == 7).all() and masks[1, 3] == 2 and masks[1].sum() == 2


def test_text_that_must_be_empty_is_over_at_its_beginning(grammar):
    matcher = matcher_of(grammar, "grammar", 'root ::= ""')
    assert matcher.is_accepting() and matcher.is_terminated() and not mask_of(matcher, CTX.vocab_size)


def test_grammar_without_any_text_breaks_with_one_line(name, grammar):
    matcher = matcher_of(grammar, "grammar", "root ::= root")
    if name == "xgrammar":
        assert not mask_of(matcher, CTX.vocab_size) and not matcher.is_accepting()
    else:
        with pytest.raises(RuntimeError, match=r"^NoExtensionBias$"):
            mask_of(matcher, CTX.vocab_size)


@pytest.mark.parametrize("word", ["minLength", "maxLength", "minItems", "maxProperties"])
def test_count_below_0_is_refused(grammar, word):
    kind = {"L": "string", "I": "array", "P": "object"}[word[3]]
    with pytest.raises(ValueError, match=f"{word}.*-1|-1.*{word}|{word}"):
        grammar.check(GrammarSpec("json", json.dumps({"type": kind, word: -1})))


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "maxLength": 2}, {"type": ["string", "null"], "maxLength": 1},
     {"type": "object", "propertyNames": {"type": "string", "maxLength": 2}},
     {"anyOf": [{"type": "string", "minLength": 1}, {"const": "\u00fc\\"}]}],
)  # fmt: skip
def test_string_whose_length_counts_holds_no_character_that_json_forbids(schema):
    matcher = matcher_of(made("xgrammar"), "json", json.dumps(schema))
    assert matcher.accept(b'{"' if schema.get("type") == "object" else b'"')
    assert mask_of(matcher, CTX.vocab_size).isdisjoint(range(32))
    assert {ord("a"), 0x7F, 0xC3} <= mask_of(matcher, CTX.vocab_size)


def test_string_of_a_structural_tag_holds_no_character_that_json_forbids():
    content = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 4}}
    tag = {"format": {**TAG, "tags": [{"begin": "<f>", "content": content, "end": "</f>"}]}}
    matcher = matcher_of(made("xgrammar"), "structural_tag", json.dumps(tag))
    assert matcher.accept(b'so\t\n <f>"') and mask_of(matcher, CTX.vocab_size).isdisjoint(range(32))
    assert matcher.accept(b'ab"</f>') and 9 in mask_of(matcher, CTX.vocab_size)


@pytest.mark.parametrize(
    "name",
    [
        "gr\u00f6\u00dfe",
        "\u007fa",
        "\u0080a",
        "\u0100a",
        "\U00010000f",
        "\\\\xdfe",
        '"e',
        "\n1",
        "\u0001e",
        "-]^[",
        "\ufeffa",
    ],
)
def test_grammar_that_xgrammar_prints_is_read_the_same(name):
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": f"^[{name[-1]}-\u00ff]\u00dfe$"}, "n": {"enum": [name]}},
    }
    schema["properties"]["s"] = {"type": "string", "format": "email"}
    library = made("xgrammar")._xgrammar.Grammar
    printed = str(library.from_json_schema(json.dumps(schema)))
    assert str(library.from_ebnf(legible(printed))) == printed


@pytest.mark.parametrize(
    ("bounds", "text"),
    [({"exclusiveMinimum": 0, "maximum": 0.5}, "0"), ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.25}, "2"),
     ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0"), ({"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, "-1")],
)  # fmt: skip
def test_bound_that_llguidance_lets_through_is_refused(bounds, text):
    grammar, schema = made("llguidance"), json.dumps({"type": "number", **bounds})
    library = grammar._llguidance.LLMatcher
    matcher = library(grammar._tokenizer, library.grammar_from_json_schema(schema))
    assert matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
    with pytest.raises(ValueError, match=r"at #: exclusiveM.* itself is let through by llguidance"):
        grammar.check(GrammarSpec("json", schema))
    content = {"type": "json_schema", "json_schema": json.loads(schema)}
    with pytest.raises(ValueError, match=r"itself is let through by llguidance"):
        tag = {**TAG, "tags": [{**TAG["tags"][0], "content": content}]}
        grammar.check(GrammarSpec("structural_tag", json.dumps({"format": tag})))
    assert not fits(made("xgrammar"), "json", schema, text)


NUMBERS = [
    s + a + f for s in ("", "-") for a in ("0", "1", "2", "9", "10") for f in ("", ".0", ".00", ".25", ".5", ".75")
]


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum", None])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum", None])
def test_number_outside_of_its_bounds_never_fits(grammar, low, high):
    for a, b in ((0, 0.5), (0, 1), (-1, 0), (-0.25, 0), (0.5, 2), (1, 1.5), (-2.5, -2), (-2.5, 9.75), (-2, -1)):
        bounds = {word: value for word, value in ((low, a), (high, b)) if word}
        try:
            grammar.check(GrammarSpec("json", schema := json.dumps({"type": "number", **bounds})))
        except ValueError:
            assert isinstance(grammar, LLGuidance)
            continue
        compiled = grammar.compile(GrammarSpec("json", schema))
        for text in NUMBERS:
            matcher, number = compiled.matcher(), float(text)
            if matcher.accept(text.encode()) and matcher.is_accepting():
                assert low is None or number > a or (number == a and low == "minimum"), (schema, text)
                assert high is None or number < b or (number == b and high == "maximum"), (schema, text)


def test_schema_that_is_true_allows_any_json(grammar):
    assert fits(grammar, "json", "true", '[1, {"a": null}]')
