"""JSON schemas of many kinds, made by a seed. Each bounds what keeps to it, so that any model comes to an end."""

import json
import random
import re
from collections.abc import Callable
from datetime import date
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

NAMES = ("id", "name", "age", "tags", "price", "is_open", "a-b", 'quo"te', "$x")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z]-[0-9]{3}$", "^(yes|no)$", "^[0-9a-f]{4}$", "^ab*$")
FORMATS = ("date", "uuid", "ipv4")
MOST_DEPTH = 3
CHECKER = FormatChecker(Draft202012Validator.FORMAT_CHECKER.checkers)


def assert_valid(text: str, schema: Schema) -> None:
    """JSON that keeps to the schema, its formats too."""
    jsonschema.validate(json.loads(text), schema, Draft202012Validator, format_checker=CHECKER)


@CHECKER.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """As RFC 3339 has it: with a year 0, a leap year like 4, which Python does not know."""
    if not isinstance(value, str):
        return True
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value) and date.fromisoformat(re.sub("^0000", "0004", value)))


def schemas(number: int, seed: int = 0) -> list[Schema]:
    """So many, of objects most often."""
    return [schema_of(random.Random(f"{seed}:{index}")) for index in range(number)]


def schema_of(rng: random.Random) -> Schema:
    top = rng.choice((_object, _object, _object, _object, _array, _any_of, _referring))
    return top(rng, 0)


def _value(rng: random.Random, depth: int) -> Schema:
    flat: tuple[Callable[[random.Random, int], Schema], ...] = (_string, _integer, _number, _simple, _enum)
    deep = (_object, _array, _any_of) if depth < MOST_DEPTH else ()
    return rng.choice((*flat, *deep))(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = names if rng.random() < 0.6 else rng.sample(names, rng.randint(0, len(names)))
    properties = {name: _value(rng, depth + 1) for name in names}
    schema: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if rng.random() < 0.1:
        schema["title"], schema["description"] = "A thing", "What it is."
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.2:
        items = [_value(rng, depth + 1) for _ in range(least + 1)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    items = {"items": _value(rng, depth + 1)}
    return {"type": "array", **items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _referring(rng: random.Random, depth: int) -> Schema:
    """A chain of at most three, by a definition that refers to itself through what may be left out."""
    node = {
        "type": "object",
        "properties": {"value": _value(rng, MOST_DEPTH), "kind": {"const": "node"}},
        "required": ["value", "kind"],
        "additionalProperties": False,
    }
    pair = {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 3}
    return (
        {"$defs": {"node": node, "pair": pair}, "$ref": "#/$defs/pair"}
        if rng.random() < 0.5
        else {
            "$defs": {"node": node},
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/node"}, "second": {"$ref": "#/$defs/node"}},
            "required": ["first"],
            "additionalProperties": False,
        }
    )


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.choice((-1000, -5, 0, 1, 17))
    high = low + rng.choice((0, 3, 99, 12345))
    if rng.random() < 0.2 and high > low:
        return {"type": "integer", "exclusiveMinimum": low, "maximum": high}
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(rng: random.Random, depth: int) -> Schema:
    # Else a number may have any number of digits, and some models never come to their end.
    return {"type": "number", "minimum": 0, "maximum": rng.choice((1, 2.5, 100)), "multipleOf": 0.5}


def _simple(rng: random.Random, depth: int) -> Schema:
    return rng.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": "fixed"}))


def _enum(rng: random.Random, depth: int) -> Schema:
    return {
        "enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True, 'a "b"', ["x"], {"k": 0}], rng.randint(1, 4))
    }
