"""A target's folder laid out for another program, by the modules NAME_layout.py of this room.

Each has write(folder, out, dtype), which makes the file or folder `out`: of weights in this dtype, None: the layout's choice.
It raises ValueError for a target that the program cannot represent.
"""

from importlib import import_module
from pathlib import Path

from longspec.distributed import log


def write_target(folder: Path, layout: str, out: Path, dtype: str | None = None) -> None:
    """Write a target in a layout. Raises ValueError for an unknown one, an `out` that is there already, and as the layout."""
    known = sorted(path.stem.removesuffix("_layout") for path in Path(__file__).parent.glob("*_layout.py"))
    if layout not in known:
        raise ValueError(f"--layout: {layout}: targets have no such layout; known: {', '.join(known)}")
    if out.exists():
        raise ValueError(f"--out: {out}: is there already; give another name, or remove it")
    import_module(f"longspec.target.{layout}_layout").write(folder, out, dtype)
    log(f"{out}: written")
