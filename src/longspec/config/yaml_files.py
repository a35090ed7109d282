"""YAML files: a user's, read so that nothing is lost; and frozen sections, as canonical text and back, typed and checked."""

import copy
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from longspec import methods
from longspec.config.checks import CHECKS
from longspec.config.faults import faults_in, one_line
from longspec.config.schema import Recipe


class _Strict(yaml.SafeLoader):
    """Refuse a key that stands twice; YAML's own loader takes the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"key '{key.value}' stands twice, first in line {lines[key.value]}; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Return what YAML text holds, cached: a plan reads the same files twenty times, which took half of its time."""
    return yaml.load(text, Loader=_Strict)


def read(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises ValueError, with file and line, if the file is missing, not UTF-8, not YAML, or has a key twice.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; correct the path")
    content = path.read_bytes()
    try:
        return copy.deepcopy(_parsed(content.decode("utf-8")))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}: line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def to_yaml(section: Any) -> str:
    """Return canonical YAML, resolved and with sorted keys: equal configurations are equal text."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(section)), sort_keys=True)


def plain(section: Any) -> dict[str, Any]:
    """Return a typed section as a dictionary, resolved, without the LATER fields that have their defaults.

    A recipe leaves out `method` if its `_target_` names the method and all of the method's keys have their defaults.
    """
    schema, values = OmegaConf.get_type(section), {}
    assert schema is not None
    for each in fields(schema):
        value = section[each.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            value = plain(value)
        elif OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        default = asdict(default) if is_dataclass(default) and not isinstance(default, type) else default
        if not (each.metadata.get("later") and value == default):
            values[each.name] = value
    if (
        schema is Recipe
        and "_target_" in values["model"]
        and section.method == methods.settings_of(section.method.name).Method()
    ):
        del values["method"]
    return values


def load(path: Path, schema: type) -> Any:
    """Return a frozen section, typed by its dataclass, and checked as when it was composed.

    Raises ValueError, with the file's name, if it does not fit.
    """
    section = typed(read(path), schema, path)
    with faults_in(path):
        CHECKS[schema](section)
    return section


def typed(content: Any, schema: type, source: Path) -> Any:
    """Return a frozen section's content, typed by its dataclass, read-only. Raises ValueError with the source's name."""
    content = OmegaConf.create(content)
    expected = OmegaConf.structured(schema)
    if schema is Recipe:
        target, name = (OmegaConf.select(content, key) for key in ("model._target_", "method.name"))
        if name is None and target is None:
            raise ValueError(f"{source}: recipe.method.name: missing, and recipe.model._target_, which would say it, too")
        with faults_in(source):
            settings = methods.settings_of(name or methods.of_target(target)[0])
        expected.method, expected.draft = OmegaConf.structured(settings.Method), OmegaConf.structured(settings.Draft)
    try:
        section = OmegaConf.merge(expected, content)
        OmegaConf.to_container(section, throw_on_missing=True)
    except Exception as error:
        raise ValueError(f"{source}: not a {schema.__name__.lower()} of this version: {one_line(error)}") from error
    OmegaConf.set_readonly(section, True)
    return section


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the keys in which two nested dictionaries differ, each as 'key: old -> new'."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {left} -> {right}")
    return lines
