"""A section as a file: written as canonical text, read back typed and checked."""

from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longspec import methods
from longspec.config import yaml_files
from longspec.config.checks import CHECKS
from longspec.config.explain import faults_in
from longspec.config.faults import one_line
from longspec.config.schema import Recipe


def to_yaml(section: Any) -> str:
    """Canonical YAML: resolved and key-sorted, so equal configurations are equal text."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(section)), sort_keys=True)


def plain(section: Any) -> dict[str, Any]:
    """A typed section as a dictionary, resolved, less the later fields that stand at their defaults.

    A recipe whose `_target_` says the method says it in no other place.
    """
    schema, values = OmegaConf.get_type(section), {}
    assert schema is not None
    for each in fields(schema):
        value = section[each.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            value = plain(value)
        elif OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if not (each.metadata.get("later") and value == _default(each)):
            values[each.name] = value
    if (
        schema is Recipe
        and "_target_" in values["model"]
        and section.method == methods.settings_of(section.method.name).Method()
    ):
        del values["method"]
    return values


def _default(each: Field[Any]) -> Any:
    """A field's default as a plain value, also where a function makes it."""
    default = each.default if each.default_factory is MISSING else each.default_factory()
    return asdict(default) if is_dataclass(default) and not isinstance(default, type) else default


def _schema_of(content: Any) -> DictConfig:
    """The typed recipe that the content of a frozen one must fit: that of its method."""
    target, name = (OmegaConf.select(content, key) for key in ("model._target_", "method.name"))
    if name is None and target is None:
        raise ValueError("recipe.method.name: missing, and recipe.model._target_, which would say it, too")
    settings = methods.settings_of(name or methods.of_target(target)[0])
    schema = OmegaConf.structured(Recipe)
    schema.method, schema.draft = OmegaConf.structured(settings.Method), OmegaConf.structured(settings.Draft)
    return schema


def load(path: Path, schema: type) -> Any:
    """Read a frozen section back, typed by its dataclass and checked as when it was composed.

    Raises ValueError with the file's name for what does not fit.
    """
    section = typed(yaml_files.read(path), schema, path)
    with faults_in(path):
        CHECKS[schema](section)
    return section


def typed(content: Any, schema: type, source: Path) -> Any:
    """A frozen section's content, typed by its dataclass. Raises ValueError with the source's name for what does not fit."""
    content = OmegaConf.create(content)
    with faults_in(source):
        expected = _schema_of(content) if schema is Recipe else OmegaConf.structured(schema)
    try:
        section = OmegaConf.merge(expected, content)
        OmegaConf.to_container(section, throw_on_missing=True)
    except Exception as error:
        raise ValueError(f"{source}: not a {schema.__name__.lower()} of this version: {one_line(error)}") from error
    OmegaConf.set_readonly(section, True)
    return section


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys in which two nested dictionaries differ, each as 'key: old -> new'."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {left} -> {right}")
    return lines
