"""Command-line values of the report and the comparison."""

import argparse
import json
from pathlib import Path
from typing import Any


def named_folder(text: str) -> tuple[str, Path]:
    """NAME=FOLDER as a pair."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, Path(folder)


def json_value(text: str) -> Any:
    """The JSON text, parsed."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
