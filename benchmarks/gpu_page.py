"""The page of what ran on GPUs, in the style of the reports: python benchmarks/gpu_page.py [FOLDER]

Reads gpu.json and the lines that its parts keep beside it, and writes gpu.html there.
"""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import RESULTS
from longspec.atomic_files import read_json, write_text
from longspec.jsonl import whole_lines
from longspec.report.page import environment

Row = dict[str, Any]


def by_card(path: Path) -> dict[str, list[Row]]:
    """Return a part's lines by card and torch, those that only measured the card's rates left out."""
    rows: dict[str, list[Row]] = {}
    for row in whole_lines(path):
        if "what" not in row:
            rows.setdefault(f"{row['device']}, torch {row['torch']}", []).append(row)
    return rows


def side_by_side(rows: list[Row]) -> tuple[list[str], list[Row]]:
    """Return the ways of attention, and for each length and visibility what each way took; the fastest is marked."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    tables = []
    for (length, sees), group in groupby(rows, key=lambda row: (row["length"], row["sees"])):
        found = {row["way"]: row for row in group}
        fastest = min(found.values(), key=lambda row: row["seconds"])["way"]
        tables.append({"length": length, "sees": sees, "ways": found, "fastest": fastest})
    return ways, tables


def standing(part: Row) -> str:
    """Return how a part stands in a word that the page's style knows: yes, no or open."""
    if part.get("failed_with") or part.get("failed") or part.get("bit_equal") is False:
        return "no"
    return "open" if part.keys() & {"missing", "unfinished"} else "yes"


def page(folder: Path) -> None:
    """Write the page."""
    parts = read_json(folder / "gpu.json") if (folder / "gpu.json").is_file() else {}
    made = environment()
    made.loader = ChoiceLoader([made.loader, FileSystemLoader(Path(__file__).parent)])
    attention = {card: side_by_side(rows) for card, rows in by_card(folder / "attention_cuda.jsonl").items()}
    text = made.get_template("gpu.html.j2").render(
        parts=parts,
        standings={name: standing(part) for name, part in parts.items()},
        steps=by_card(folder / "gpu_steps.jsonl"),
        attention=attention,
        decode=by_card(folder / "gpu_decode.jsonl"),
    )
    write_text(folder / "gpu.html", text)


if __name__ == "__main__":
    page(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
