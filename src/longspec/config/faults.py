"""Say what is wrong with values, by the types of their keys: a line for each fault, with the key and what is allowed."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from longspec.config.typed import OwnTitles
from longspec.shown import ManyLinesError

Node = dict[str, Any]  # of a JSON Schema
Place = tuple[str | int, ...]  # of a value in mappings and lists
NOT_KNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's words for an unknown key of a model, a dataclass
LONGEST = 80  # characters of a value that is shown


@contextmanager
def faults_in(place: object) -> Iterator[None]:
    """Put the place at fault, a file or a key, before each line of a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ManyLinesError(*(f"{place}: {line}" for line in str(error).split("\n"))) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return all known names, after a hint at the likeliest one."""
    close = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}."


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Return a message for an unknown key, with the known ones."""
    return f"unknown key; {did_you_mean(name, known)}"


def check(kind: Any, values: Any, key: str = "") -> None:
    """Raise ValueError, with a line for each key below `key` that is unknown, missing or wrong.

    kind: a dataclass or a pydantic model. The value of an unknown key is not shown: it may be a secret, such as a token of the
    hub.
    """
    if lines := faults_of(kind, values, key):
        raise ManyLinesError(*lines)


def faults_of(kind: Any, values: Any, key: str = "") -> list[str]:
    """Return a line for each fault; a misspelt key comes before the missing key that it causes."""
    values = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
    by_place: dict[Place, list[Any]] = {}
    for place, fault in _placed(kind, values):
        by_place.setdefault(place, []).append(fault)
    found = sorted(by_place.items(), key=lambda item: item[1][0]["type"] == "missing")
    return [_line(schema_of(kind), values, key, place, faults) for place, faults in found]


def wrong_places(kind: Any, values: Any) -> list[Place]:
    """Return the places of wrong values; unknown and missing keys are left out."""
    return [place for place, fault in _placed(kind, values) if fault["type"] not in ("missing", *NOT_KNOWN)]


@cache
def schema_of(kind: Any) -> Node:
    """Return the JSON Schema of a type."""
    return _adapter(kind).json_schema(schema_generator=OwnTitles)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _placed(kind: Any, values: Any) -> Iterator[tuple[Place, Any]]:
    """Yield each fault with its place in the values. A value that may have several forms is one place."""
    try:
        _adapter(kind).validate_python(values)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            place, at = [], values
            for part in fault["loc"]:
                try:
                    at = at[part]
                except (KeyError, IndexError, TypeError):  # pydantic's name of a form, a mapping's key or a missing key
                    break
                place.append(part)
            yield (*place, *fault["loc"][-1:]) if fault["type"] == "missing" else tuple(place), fault


def _line(whole: Node, values: Any, key: str, place: Place, faults: list[Any]) -> str:
    where = ".".join(map(str, [key] * bool(key) + list(place))) or "top level"
    first = faults[0]
    if first["type"] in NOT_KNOWN:
        known = [name for form in _forms(whole, node_at(whole, place[:-1])) for name in form.get("properties", {})]
        return f"{where}: {unknown_key(str(place[-1]), known)}"
    node = node_at(whole, place)
    meaning = f"; it is {node['description']}" if "description" in node else ""
    if first["type"] == "missing":
        return f"{where}: missing; give {allowed(node, whole)}{meaning}"
    for part in place:
        values = values[part]
    if len(faults) == 1 and first["type"] == "value_error":
        return f"{where}: {first['ctx']['error']}{meaning}"
    if len(faults) == 1 and first["type"] == "literal_error":
        return f"{where}: {shown(values)} is unknown; choose {allowed(node, whole)}{meaning}"
    return f"{where}: must be {allowed(node, whole)}, is {shown(values)}{meaning}"


def shown(value: Any) -> str:
    """Return a value as messages show it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict) and value:
        return "a mapping"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def node_at(whole: Node, place: Place) -> Node:
    """Return what a schema says of a place; {} if it does not know the place."""
    node = whole
    for part in place:
        node = next((each for form in _forms(whole, node) for each in _below(form, part)), {})
    return node


def _below(form: Node, part: str | int) -> Iterator[Node]:
    """Yield what one form of a value says of a part of it: of this key, of any key, or of each item."""
    named = [form.get("properties", {}).get(part), *form.get("patternProperties", {}).values()]
    yield from (each for each in (*named, form.get("additionalProperties"), form.get("items")) if isinstance(each, dict))


def _forms(whole: Node, node: Node) -> list[Node]:
    """Return the forms that a value may have, with references resolved."""
    if "$ref" in node:
        return _forms(whole, whole["$defs"][node["$ref"].rsplit("/", 1)[-1]])
    return [form for each in node["anyOf"] for form in _forms(whole, each)] if "anyOf" in node else [node]


def allowed(node: Node, whole: Node) -> str:
    """Return in words what a value may be, such as "a whole number from 1 to 64, or null"."""
    if "title" in node and "properties" not in node:
        return str(node["title"])
    if "anyOf" in node:
        *others, last = dict.fromkeys(allowed(each, whole) for each in node["anyOf"])
        return f"{', '.join(others)}, or {last}" if others else last
    [form] = _forms(whole, node)
    if form is not node:
        return allowed(form, whole)
    if "const" in form or "enum" in form:
        known = [each if isinstance(each, str) else shown(each) for each in form.get("enum", [form.get("const")])]
        return f"one of {', '.join(known)}" if len(known) > 1 else known[0]
    kind = form.get("type")
    if kind in ("integer", "number"):
        words = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "to below", "maximum": "to"}
        bounds = [f" {word} {form[bound]}" for bound, word in words.items() if bound in form]
        return f"a {'whole ' if kind == 'integer' else ''}number{''.join(bounds)}"
    if kind == "array":
        return _list(form, whole)
    return {
        "string": "a text" if not form.get("minLength") else "a text that is not empty",
        "boolean": "true or false",
        "object": "a mapping",
        "null": "null",
    }.get(str(kind), "anything")


def _list(form: Node, whole: Node) -> str:
    fewest, most = form.get("minItems"), form.get("maxItems")
    size = f" of {fewest}" if fewest == most and fewest else f" of {fewest} to {most}" if fewest and most else ""
    each = allowed(form["items"], whole) if form.get("items") else ""
    return f"a list{size}{' that is not empty' if fewest and not most else ''}{f', each {each}' if each else ''}"


def one_line(error: BaseException) -> str:
    """Return the cause of an error of Hydra or OmegaConf with its key and file; Hydra wraps the cause and knows the file."""
    file = re.match(r"In '(.+?)':", str(error))
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        cause = cause.__context__
    if file and cause is None and "DictConfig with ListConfig" in str(error):  # OmegaConf names no key in a file
        return f"a list stands where a mapping belongs, such as recipe.data.replay: {{base: 0.2}} (in {file[1]}.yaml)"
    if not isinstance(cause, OmegaConfBaseException):
        return " ".join(str(error).partition("Config search path")[0].split())
    told = str(cause.msg or cause).partition("\n")[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and is_dataclass(cause.object_type):
        told = unknown_key(str(cause.key), [field.name for field in fields(cause.object_type)])
    return f"{cause.full_key}: {told}" + (f" (in {file[1]}.yaml)" if file else "")
