"""YAML files of a user, read so that nothing is lost: a key that stands twice is a mistake, not the second value."""

from pathlib import Path
from typing import Any

import yaml


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"key '{key.value}' stands twice, first in line {lines[key.value]}; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def told(error: yaml.YAMLError) -> str:
    """Line and fault of what the YAML parser refuses, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"line {error.problem_mark.line + 1}: {error.problem}"


def read(path: Path) -> Any:
    """The content of a YAML file.

    Raises ValueError with file and line for a file that is not there, is no UTF-8, no YAML, or has a key twice.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; correct the path")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        return yaml.load(text, Loader=_Strict)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {told(error)}") from None
