"""A section as a file: written as canonical text, read back typed and checked."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from longspec.config import yaml_files
from longspec.config.checks import CHECKS
from longspec.config.explain import one_line


def to_yaml(section: Any) -> str:
    """Canonical YAML: resolved and key-sorted, so equal configurations are equal text."""
    return OmegaConf.to_yaml(section, resolve=True, sort_keys=True)


def load(path: Path, schema: type) -> Any:
    """Read a frozen section back, typed by its dataclass and checked as when it was composed.

    Raises ValueError with the file's name for what does not fit.
    """
    section = typed(yaml_files.read(path), schema, path)
    try:
        CHECKS[schema](section)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return section


def typed(content: Any, schema: type, source: Path) -> Any:
    """A frozen section's content, typed by its dataclass. Raises ValueError with the source's name for what does not fit."""
    try:
        section = OmegaConf.merge(OmegaConf.structured(schema), content)
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


def dataclass_from(schema: type, section: DictConfig) -> Any:
    """A plain dataclass instance from a typed section."""
    values = OmegaConf.to_container(section, resolve=True)
    assert isinstance(values, dict)
    return schema(**{f.name: values[f.name] for f in fields(schema)})
