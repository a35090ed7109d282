"""`python -m longspec.compare`: two runs side by side on the same prompts, as one self-contained HTML page and as JSON."""

import argparse
import json
from pathlib import Path

from longspec import shown
from longspec.command_line import named_path
from longspec.compare.numbers import compare_numbers, read_pair
from longspec.compare.page import render
from longspec.evaluate.tasks import parse
from longspec.report.page import write_page


def variants_of(text: str) -> tuple[str, str]:
    """NAME for both runs, or FIRST=SECOND."""
    first, _, second = text.partition("=")
    return first, second or first


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The verb's arguments."""
    parser = argparse.ArgumentParser(prog="python -m longspec.compare", description=__doc__)
    parser.add_argument("--run", required=True, action="append", type=named_path, help="NAME=FOLDER; give two")
    both = "a variant that both runs have, or FIRST=SECOND, one of each; repeat it"
    parser.add_argument("--variant", required=True, action="append", type=variants_of, help=both)
    parser.add_argument("--settings", required=True, type=json.loads, help="the evaluation section as JSON")
    parser.add_argument("--out", required=True, type=Path, help="the page; the numbers go beside it as .json")
    return parser.parse_args(arguments)


def make_comparison(options: argparse.Namespace) -> None:
    """Read both runs, then write the numbers and the page."""
    settings = parse(options.settings)
    pairs = [read_pair(variants, options.run, settings) for variants in options.variant]
    numbers = compare_numbers(pairs, settings)
    write_page(options.out, render(pairs, numbers, settings), numbers)


def main() -> None:
    """Read the command line."""
    with shown.ending_for_mistakes():
        make_comparison(parse_arguments())


if __name__ == "__main__":
    main()
