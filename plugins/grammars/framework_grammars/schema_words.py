"""JSON Schemas that xgrammar reads with parts left out: refused here, since their outputs would not validate.

The library passes over what it does not know, and over words beside `$ref`, `enum` and the like. Each rule below is
held against the library by a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from framework_grammars.regex_words import objections as objections_to_pattern

_PASSED_OVER = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_OF_A_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems", "uniqueItems", "items", "prefixItems", "unevaluatedItems"),
    "object": (
        "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
        "propertyNames", "unevaluatedProperties",
    ),
}  # fmt: skip
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Words beside which the library reads no other."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
_ASSERTIONS = {"type", *_ALONE, *(word for words in _OF_A_TYPE.values() for word in words)}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_CLASSES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_WAY_OUT = "Leave it out, or use grammar=llguidance"


MAX_DEPTH = 100
"""Schemas inside of one another: the time that the library takes grows with the cube of them, 10 s at 450."""


def refuse_ignored(schema: Any) -> None:
    """ValueError for the first part of the schema that would be passed over, with its place, and for too deep ones."""
    for path, node in schemas(schema):
        for objection in _objections(node):
            raise ValueError(f"at {path}: {objection}. {_WAY_OUT}")


def refuse_ignored_in_tags(tag: Any) -> None:
    """`refuse_ignored` of the schemas and expressions that are the content of a structural tag."""
    for node in _inside(tag):
        if isinstance(node, Mapping) and node.get("type") == "json_schema":
            refuse_ignored(node.get("json_schema"))
        elif isinstance(node, Mapping) and node.get("type") == "regex":
            refuse_misread(node.get("pattern"))


def refuse_misread(pattern: Any) -> None:
    """ValueError for the first part of an expression that would be read otherwise than it is written."""
    if isinstance(pattern, str):
        for objection in objections_to_pattern(pattern, in_json=False):
            raise ValueError(f"{objection}. {_WAY_OUT}")


def _inside(value: Any) -> Iterator[Any]:
    """The value, and all that it holds, at any depth."""
    rest = [value]
    while rest:
        yield (one := rest.pop())
        rest += one.values() if isinstance(one, Mapping) else _list(one)


def schemas(node: Any, path: str = "#", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, schema) of each schema inside of `node`: values of `const`, `enum` and `default` are none."""
    if not isinstance(node, Mapping):
        return
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} schemas are inside of one another. Nest them less, or use '$ref'")
    yield path, node
    for word in _NAMED:
        for name, inner in _items(node.get(word)):
            yield from schemas(inner, f"{path}/{word}/{name}", depth + 1)
    for word in _LISTED:
        for index, inner in enumerate(_list(node.get(word))):
            yield from schemas(inner, f"{path}/{word}/{index}", depth + 1)
    for word in _SINGLE:
        yield from schemas(node.get(word), f"{path}/{word}", depth + 1)


def _objections(node: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"'{word}' is not read by xgrammar" for word in _PASSED_OVER if word in node)
    yield from (f"'{word}' is empty" for word in ("type", *_LISTED[:3]) if node.get(word) == [])
    yield from _beside(node)
    yield from _of_types(node)
    yield from _of_strings(node)
    yield from _of_values(node)
    yield from _of_objects(node)
    if node.get("uniqueItems"):
        yield "'uniqueItems' is not read by xgrammar"
    if len(_list(node.get("allOf"))) > 1:
        yield "of several schemas in 'allOf' xgrammar reads none"
    if not str(node.get("$ref", "#")).startswith("#") or str(node.get("$ref", "#/"))[1:2] not in ("", "/"):
        yield f"$ref={node['$ref']!r} is none of '#/...', and no other document is read"
    if any(not _are_apart(a, b) for a, b in combinations(_list(node.get("oneOf")), 2)):
        yield "'oneOf' is read as 'anyOf', and a value may fit two of its schemas. Write 'anyOf', if that will do"


def _beside(node: Mapping[str, Any]) -> Iterator[str]:
    for word in _ALONE:
        others = [other for other in _ASSERTIONS & set(node) if other != word]
        if word not in node or not others:
            continue
        values = _list(node.get("enum")) if word == "enum" else [node.get("const")]
        if others == ["type"] and word in ("const", "enum") and all(_is_of(value, _types(node)) for value in values):
            continue
        yield f"'{sorted(others)[0]}' beside '{word}' is not read by xgrammar"


def _of_types(node: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{word}={node[word]} is below 0" for word in _COUNTS if _is_below_0(node.get(word)))
    if "type" not in node:
        bare = [word for kind in ("string", "number") for word in _OF_A_TYPE[kind] if word in node]
        yield from (f"'{word}' without a 'type' is not read by xgrammar" for word in bare)
    lengths = {"minLength", "maxLength"} & set(node)
    kinds = [bool(lengths), "pattern" in node, "format" in node]
    if sum(kinds) > 1:
        yield "of 'pattern', 'format' and lengths xgrammar reads one only"
    if "multipleOf" in node and not (_types(node) == {"integer"} and isinstance(node["multipleOf"], int)):
        yield "'multipleOf' is read of integers only, by xgrammar"


def _is_below_0(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def _of_strings(node: Mapping[str, Any]) -> Iterator[str]:
    if _types(node) & {"string"} and "format" in node and node["format"] not in _FORMATS:
        yield f"format={node['format']!r} is not read by xgrammar, which reads {', '.join(_FORMATS)}"
    for pattern in (node.get("pattern"), *dict(_items(node.get("patternProperties")))):
        if isinstance(pattern, str):
            yield from (f"pattern {pattern!r}: {one}" for one in objections_to_pattern(pattern, in_json=True))


def _of_values(node: Mapping[str, Any]) -> Iterator[str]:
    for value in _inside([node.get("const"), node.get("enum")]):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield f"{value} is read as a number with less digits by xgrammar"


def _of_objects(node: Mapping[str, Any]) -> Iterator[str]:
    names = {word for word in ("properties", "patternProperties", "propertyNames") if node.get(word)}
    if len(names) > 1:
        yield f"of {' and '.join(sorted(names))} together xgrammar reads one only"
    absent = [name for name in _list(node.get("required")) if name not in dict(_items(node.get("properties")))]
    if absent:
        yield f"required property {absent[0]!r} has no schema in 'properties', and is not asked for by xgrammar"


def _are_apart(a: Any, b: Any) -> bool:
    """Whether no value fits both: by their types, or by a property that both ask for and that differs."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    if _types(a) and _types(b) and not _overlap(_types(a), _types(b)):
        return True
    if _values(a) and _values(b):
        return not _values(a) & _values(b)
    shared = set(_list(a.get("required"))) & set(_list(b.get("required")))
    pairs = [(dict(_items(a.get("properties"))).get(n), dict(_items(b.get("properties"))).get(n)) for n in shared]
    both_objects = _types(a) == _types(b) == {"object"}
    return both_objects and any(_values(x) and _values(y) and not _values(x) & _values(y) for x, y in pairs)


def _values(schema: Any) -> set[str]:
    """The values that a schema lists, spelled out; none when it lists none."""
    if not isinstance(schema, Mapping):
        return set()
    return {repr(value) for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]}


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    return {given} if isinstance(given, str) else {t for t in _list(given) if isinstance(t, str)}


def _overlap(a: set[str], b: set[str]) -> bool:
    wide = {"number": {"number", "integer"}}
    return any(x == y or y in wide.get(x, ()) or x in wide.get(y, ()) for x in a for y in b)


def _is_of(value: Any, types: set[str]) -> bool:
    name = "null" if value is None else _CLASSES[type(value)]
    return name in types or (name == "integer" and "number" in types)


def _items(value: Any) -> Sequence[tuple[str, Any]]:
    return tuple(value.items()) if isinstance(value, Mapping) else ()


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
