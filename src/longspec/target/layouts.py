"""A target's folder laid out for another program, by the modules NAME_layout.py of this room.

Each has check(config, file), which raises ValueError for a target that the program cannot represent, and write(folder, out,
dtype), which makes the file or folder `out`: of weights in this dtype, None: the layout's choice.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from longspec.distributed import log
from longspec.models.target_config import CONFIG, read_target_config


def checked_layout(folder: Path, layout: str, out: Path) -> Any:
    """Return the module of a layout. Raises ValueError for an unknown one, an `out` that is there already, and as its check."""
    known = sorted(path.stem.removesuffix("_layout") for path in Path(__file__).parent.glob("*_layout.py"))
    if layout not in known:
        raise ValueError(f"--layout: {layout}: targets have no such layout; known: {', '.join(known)}")
    if out.exists():
        raise ValueError(f"{out}: is there already; give another name, or remove it")
    module = import_module(f"longspec.target.{layout}_layout")
    module.check(read_target_config(str(folder)), folder / CONFIG)
    return module


def write_target(folder: Path, layout: str, out: Path, dtype: str | None = None) -> None:
    """Write a target in a layout. Raises ValueError as checked_layout and as the layout."""
    checked_layout(folder, layout, out).write(folder, out, dtype)
    log(f"{out}: written")
