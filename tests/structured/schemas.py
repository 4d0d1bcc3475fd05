"""Ten JSON Schemas of growing difficulty, each with what a model is asked for it."""

_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}

SCHEMAS = {
    "boolean": ({"type": "boolean"}, "Is the sky blue? Answer in JSON: "),
    "enum": ({"type": "string", "enum": ["red", "green", "bl\u00fcte", "\u6771\u4eac"]}, "A colour as a JSON string: "),
    "number": (
        {
            "type": "object",
            "properties": {"degrees": {"type": "number", "minimum": -10, "maximum": 120.5}},
            "required": ["degrees"],
            "additionalProperties": False,
        },
        "A temperature in JSON: ",
    ),
    "object": (
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        "A person in JSON: ",
    ),
    "array": (
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 49}, "minItems": 3, "maxItems": 6},
        "The lottery numbers as a JSON array: ",
    ),
    "nested": (
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "place": {**_POINT, "additionalProperties": False},
            },
            "required": ["city", "place"],
            "additionalProperties": False,
        },
        "A city and its place on the map in JSON: ",
    ),
    "unicode": (
        {
            "type": "object",
            "properties": {
                "gr\u00f6\u00dfe": {"type": "integer", "maximum": 999},
                "\u540d\u524d": {"type": "string", "minLength": 2, "maxLength": 8},
                "\U0001f600": {"const": "\u00e9t\u00e9 \u2014 \u201cquoted\u201d"},
            },
            "required": ["gr\u00f6\u00dfe", "\u540d\u524d", "\U0001f600"],
            "additionalProperties": False,
        },
        "Eine Gr\u00f6\u00dfe und ein Name als JSON: ",
    ),
    "union": (
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "null"},
                    {"type": "integer", "minimum": -9, "maximum": 9},
                    {"type": "string", "pattern": "^[a-z]{1,5}-[0-9]{2}$"},
                ]
            },
            "minItems": 2,
            "maxItems": 4,
        },
        "Codes, numbers and gaps as a JSON array: ",
    ),
    "reference": (
        {
            "$defs": {"point": {**_POINT, "additionalProperties": False}},
            "type": "object",
            "properties": {
                "from": {"$ref": "#/$defs/point"},
                "to": {"$ref": "#/$defs/point"},
                "via": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            },
            "required": ["from", "to"],
            "additionalProperties": False,
        },
        "A way from one point to another in JSON: ",
    ),
    "recursion": (
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer", "minimum": 0, "maximum": 99},
                        "kind": {"enum": ["leaf", "node", None]},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                    },
                    "required": ["value", "kind"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        },
        "A small tree in JSON: ",
    ),
}  # fmt: skip
