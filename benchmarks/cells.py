"""Tables that take hours: each cell is a line of JSON, kept as soon as it is made, and made once."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from longspec.jsonl import whole_lines

Cell = dict[str, Any]


def fill(path: Path, wanted: Iterable[Cell], make: Callable[[Cell], Cell]) -> list[Cell]:
    """Make the wanted cells that the file has not, one after the other; the wanted ones, in order.

    wanted: the fields that identify each; make: those it adds. A line that a kill tore is made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = whole_lines(path)
    if path.is_file():
        path.write_text("".join(json.dumps(cell) + "\n" for cell in kept), encoding="utf-8")
    found = []
    for which in wanted:
        cell = next((cell for cell in kept if which.items() <= cell.items()), None)
        if cell is None:
            cell = which | make(which)
            print(json.dumps(cell), flush=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell) + "\n")
        found.append(cell)
    return found


def over_seeds(values: list[float]) -> dict[str, Any]:
    """Mean of a figure over seeds, each seed's, and from two seeds on the mean's 95 % interval (Student's t)."""
    told: dict[str, Any] = {"mean": mean(values), "each": values}
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / len(values) ** 0.5
        told["interval"] = [told["mean"] - half, told["mean"] + half]
    return told
