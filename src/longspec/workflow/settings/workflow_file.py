"""config/workflow.yaml: its text before Snakemake reads it, and its values against the schema."""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from longspec.config import CONFIG_DIR, yaml_files
from longspec.config.explain import did_you_mean
from longspec.config.names import is_name
from longspec.config.run_file import SUFFIX

SCHEMA = CONFIG_DIR / "workflow.schema.yaml"
TEMPLATED = "__use_yte__"  # has Snakemake run the file's values as Python
MODULE = re.compile(r"[A-Za-z0-9][\w.+/-]*", re.ASCII)  # it reaches a shell
FORMATS = jsonschema.FormatChecker(formats=())
FORMATS.checks("name")(lambda value: not isinstance(value, str) or is_name(value))
FORMATS.checks("run")(lambda value: not isinstance(value, str) or value.endswith(SUFFIX) or is_name(value))
FORMATS.checks("module")(lambda value: not isinstance(value, str) or MODULE.fullmatch(value) is not None)


def check_text(path: Path) -> None:
    """Raise ValueError, with the line, for a file that Snakemake would misread: no UTF-8, no YAML, a key that stands twice."""
    content = yaml_files.read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping with keys such as runs and data at its top level")
    if TEMPLATED in content:
        raise ValueError(f"{path}: {TEMPLATED}: a configuration holds values and runs no code; remove the key")


def typed_call(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of --config with numbers, true, false and null where the schema wants such and finds a text that reads so.

    In braces and brackets Snakemake reads every value as text; in files text stays text.
    """
    typed = copy.deepcopy(dict(values))
    for error in list(jsonschema.Draft202012Validator(yaml_files.read(SCHEMA)).iter_errors(typed)):
        if error.validator == "type" and isinstance(error.instance, str):
            value = _scalar(error.instance)
            if value is None or isinstance(value, int | float):
                *above, last = error.absolute_path
                reduce(getitem, above, typed)[last] = value
    return typed


def _scalar(text: str) -> Any:
    """A text as YAML reads it; what is no YAML stays a text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def check_values(settings: dict[str, Any]) -> None:
    """Hold the settings (with --config and --configfile on top) against their schema.

    Raises ValueError with a line for each key that is unknown, missing or wrong. What stands under an unknown one is not shown:
    it may be a secret, such as a token of the hub's.
    """
    if lines := list(_no_json(settings, "")):
        raise ValueError("\n".join(lines))
    validator = jsonschema.Draft202012Validator(yaml_files.read(SCHEMA), format_checker=FORMATS)
    by_place = sorted(validator.iter_errors(settings), key=lambda error: list(map(str, error.absolute_path)))
    # A misspelt key comes before the missing one that it leaves.
    if errors := sorted(by_place, key=lambda error: error.validator == "required"):
        raise ValueError("\n".join(map(_message, errors)))


def _no_json(value: Any, key: str) -> Iterator[str]:
    """A line for each value that YAML knows and a manifest cannot hold: dates, keys that are no text, numbers that are none."""
    if isinstance(value, dict):
        for name, below in value.items():
            if not isinstance(name, str):
                yield f"{_join(key, name)}: a key must be text, is {name!r}; put it in quotes"
            yield from _no_json(below, _join(key, name))
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _no_json(below, _join(key, number))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: {value} is no number; give a finite one"
    elif isinstance(value, str):
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            yield f"{key}: {value!r} holds a character that no text has"
    elif value is not None and not isinstance(value, int | float):
        yield f"{key}: {value} is read as a {type(value).__name__}; put it in quotes"


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _message(error: jsonschema.ValidationError) -> str:
    """One line of text for one violation of the schema."""
    where = ".".join(str(part) for part in error.absolute_path)
    assert isinstance(error.schema, dict)
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        assert isinstance(error.instance, dict)
        unknown = [str(key) for key in error.instance if key not in known]
        return " ".join(f"{_join(where, key)}: unknown key; {did_you_mean(key, known)}" for key in unknown)
    what = error.schema.get("description")
    return f"{where or 'top level'}: {error.message}" + (f"; it is {what}" if what else "")
