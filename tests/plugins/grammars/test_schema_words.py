"""Parts of JSON Schemas that xgrammar passes over: each refusal is needed, and what is not refused is kept to."""

import json

import pytest
from jsonschema import Draft202012Validator

from framework.interfaces import GrammarSpec
from framework_grammars.options import XGrammarOptions
from framework_grammars.schema_words import _FORMATS, refuse_ignored, refuse_ignored_in_tags
from framework_grammars.xgrammar import XGrammar

from .automata import context

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def with_tag(value):
    return {"type": "object", "properties": {"t": {"const": value}}, "required": ["t"]}


IGNORED = [  # a schema, a text that it forbids and that the library lets through, words of the refusal
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1, 1]", "uniqueItems"),
    ({"not": {"type": "string"}}, '"a"', "'not'"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"a"', "lengths"),
    ({"type": "string", "format": "date", "maxLength": 3}, '"2020-01-01"', "lengths"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, '"a"', "'if'"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1", "oneOf"),
    ({"oneOf": [with_tag("x"), with_tag("x")]}, '{"t": "x"}', "oneOf"),
    ({"allOf": [{**OBJECT, "required": ["a"]}, {**OBJECT, "required": ["a"]}]}, "{}", "allOf"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', "dependentRequired"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": {"type": "integer"}}}, "1", r"'minimum' beside '\$ref'"),
    ({"anyOf": [{"type": "integer"}], "minimum": 3}, "1", "'minimum' beside 'anyOf'"),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{}", "'type' beside 'anyOf'"),
    ({"enum": [1, 2], "type": "string"}, "1", "'type' beside 'enum'"),
    ({"const": "a", "type": "integer"}, '"a"', "'type' beside 'const'"),
    ({"enum": ["a"], "minLength": 3}, '"a"', "'minLength' beside 'enum'"),
    ({**OBJECT, "required": ["a", "z"]}, '{"a": 1}', "required property 'z'"),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["z"]}, '{"a": 1}', "property 'z'"),
    ({"type": "number", "multipleOf": 2}, "3", "multipleOf"),
    ({"minLength": 3}, '"a"', "'minLength' without a 'type'"),
    ({"minimum": 3}, "1", "'minimum' without a 'type'"),
    ({**OBJECT, "propertyNames": {"pattern": "^b"}}, '{"a": 1}', "propertyNames"),
    ({**OBJECT, "patternProperties": {"^a": {"type": "integer", "maximum": 6}}}, '{"a": 7}', "patternProperties"),
    ({"type": []}, "1", "'type' is empty"),
    ({"const": 10**25}, "1e+25", "less digits"),
    ({"enum": [0, {"a": [2**63 + 1]}]}, '{"a":[9.223372036854776e+18]}', "less digits"),
    ({"type": "string", "pattern": "^(?!b)[ab]$"}, '"b"', r"'\(\?!' \(looking around\)"),
    ({"type": "string", "pattern": "^a$b$"}, '"ab"', "in the middle"),
    ({"type": "object", "patternProperties": {"^a(?=c)": {"type": "null"}}, "additionalProperties": False},
     '{"a": null}', "looking around"),
]  # fmt: skip
KEPT = [
    ({"enum": ["a", "b"], "type": "string"}, '"a"'),
    ({"const": None, "type": ["null", "string"]}, "null"),
    ({"enum": [1, 2.5], "type": "number"}, "2.5"),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null"),
    ({"oneOf": [with_tag("x"), with_tag("y")]}, '{"t": "y"}'),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, "2"),
    ({"allOf": [{"type": "integer"}], "description": "d"}, "1"),
    ({"$ref": "#/$defs/x", "title": "t", "$defs": {"x": {"type": "integer"}}}, "1"),
    ({"type": "integer", "multipleOf": 3, "minimum": 10}, "12"),
    ({"type": "object", "properties": {"not": {"type": "integer"}, "if": {"type": "integer"}}}, '{"not": 1, "if": 2}'),
    ({"type": "string", "enum": ["uniqueItems"]}, '"uniqueItems"'),
    ({"const": {"not": 1}}, '{"not":1}'),
    ({"type": "string", "minLength": 1, "maxLength": 2}, '"ab"'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, "[1, 2]"),
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, "[1]"),
]  # fmt: skip


@pytest.fixture(scope="module")
def library():
    """Whether the library alone, without our refusals, lets a text through."""
    grammar = XGrammar(XGrammarOptions(), context())

    def lets_through(schema, text):
        compiled = grammar._compiler.compile_grammar(grammar._parse(GrammarSpec("json", json.dumps(schema))))
        matcher = grammar._xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()

    return lets_through


@pytest.mark.parametrize(("schema", "text", "words"), IGNORED)
def test_part_that_the_library_passes_over_is_refused(library, schema, text, words):
    assert library(schema, text) and not Draft202012Validator(schema).is_valid(json.loads(text))
    with pytest.raises(ValueError, match=words):
        refuse_ignored(schema)
    with pytest.raises(ValueError, match=r"^at #/properties/in/items"):
        refuse_ignored({"type": "object", "properties": {"in": {"type": "array", "items": schema}}})


@pytest.mark.parametrize(
    ("pattern", "text"),
    [('^"$', '"\""'), (r"^\\$", '"\\"'), (r"^a\n$", '"a\n"'), (r"^\x09$", '"\t"'),
     (r"^\u0001$", '"\x01"'), ("^\t$", '"\t"')],
)  # fmt: skip
def test_pattern_whose_characters_the_library_does_not_spell_as_json_does_is_refused(library, pattern, text):
    schema = {"type": "string", "pattern": pattern}
    assert library(schema, text)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    with pytest.raises(ValueError, match=r"JSON spells with a backslash, which xgrammar does not"):
        refuse_ignored(schema)


@pytest.mark.parametrize("pattern", ["^.$", "^[^a]$", r"^\S$", r"^\W$", r"^\D$", r"^\s$", r'^["\\\n\t]?$', r"^[\s\S]$"])
def test_pattern_of_many_characters_keeps_to_those_that_json_does_not_escape(library, pattern):
    schema = {"type": "string", "pattern": pattern}
    refuse_ignored(schema)
    assert not any(library(schema, f'"{c}"') for c in '"\\\n\t\x01')


@pytest.mark.parametrize("name", ["regex", "iri", "idn-email", "password"])
def test_format_that_the_library_passes_over_is_refused_and_of_numbers_it_means_nothing(library, name):
    schema = {"type": "string", "format": name}
    assert library(schema, '"\u00fc~ ["')
    with pytest.raises(ValueError, match=rf"format='{name}' is not read by xgrammar, which reads date, "):
        refuse_ignored(schema)
    refuse_ignored({"type": "number", "format": name})


@pytest.mark.parametrize("name", _FORMATS)
def test_format_that_is_not_refused_is_read(library, name):
    assert not library({"type": "string", "format": name}, '"\u00fc~ ["')
    refuse_ignored({"type": "string", "format": name})


def test_schemas_and_expressions_of_structural_tags_are_looked_at_too():
    def tag(**content):
        return {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<f>", "content": content}]}}

    refuse_ignored_in_tags(tag(type="json_schema", json_schema={"type": "integer"}))
    with pytest.raises(ValueError, match="'uniqueItems' is not read"):
        refuse_ignored_in_tags(tag(type="json_schema", json_schema={"type": "array", "uniqueItems": True}))
    with pytest.raises(ValueError, match="in the middle"):
        refuse_ignored_in_tags(tag(type="regex", pattern="a^b"))


@pytest.mark.parametrize(("schema", "text"), KEPT)
def test_schema_that_the_library_keeps_to_is_not_refused(library, schema, text):
    assert library(schema, text) and Draft202012Validator(schema).is_valid(json.loads(text))
    refuse_ignored(schema)


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_choice_of_no_schemas_is_refused(library, word):
    assert word == "allOf" or library({word: []}, "")
    with pytest.raises(ValueError, match=f"'{word}' is empty"):
        refuse_ignored({word: []})


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match=r"\$ref='http://x/y' is none of '#/\.\.\.'"):
        refuse_ignored({"$ref": "http://x/y"})
    with pytest.raises(ValueError, match=r"\$ref='#name'"):
        refuse_ignored({"$ref": "#name"})
    refuse_ignored({"$ref": "#"})


def test_schemas_that_are_nested_too_deep_are_refused_at_once():
    schema = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    refuse_ignored(schema)
    with pytest.raises(ValueError, match="more than 100 schemas are inside of one another"):
        refuse_ignored({"type": "array", "items": schema})
