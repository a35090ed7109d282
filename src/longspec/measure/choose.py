"""Choose the stage whose draft is published, by measurements on records that the report leaves out."""

import argparse
import json
from pathlib import Path

from longspec import shown
from longspec.atomic_files import write_json
from longspec.command_line import named_path
from longspec.measure import lines
from longspec.measure.choice import choice, set_apart
from longspec.measure.tasks import parse


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The verb's arguments."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure choose", description=__doc__)
    parser.add_argument("--settings", required=True, type=json.loads, help="the evaluation section as JSON")
    raw = "NAME=MANIFEST of the held-out records that prompts were drawn from"
    parser.add_argument("--raw", required=True, nargs="+", type=named_path, help=raw)
    measured = "a file of each stage, named after it, in the order of training"
    parser.add_argument("--evaluations", required=True, nargs="+", type=Path, help=measured)
    parser.add_argument("--out", required=True, type=Path, help="the choice as JSON")
    return parser.parse_args(arguments)


def choose(options: argparse.Namespace) -> None:
    """Read all measurements, set records apart, and write the choice."""
    settings, manifests = parse(options.settings), dict(options.raw)
    measured = {path.stem: lines.read(path, path.stem, settings) for path in options.evaluations}
    first, *others = measured.values()
    for other in others:
        lines.check_pairs(first, other)
    for task, data in settings.data.items():
        if data not in manifests:
            raise ValueError(f"--raw: the manifest of {data} is missing, which evaluation.tasks.{task}.data needs")
    records = set_apart(first, settings.data, manifests, settings.seed)
    content = choice(measured, settings, records)
    write_json(options.out, content)
    figures = ", ".join(f"{stage} {figure['mean']:.3f}" for stage, figure in content["figures"].items())
    print(f"{options.out}: {content['stage']}: {content['why']} ({figures or 'not measured'})")


def main(arguments: list[str]) -> None:
    """Read the command line."""
    with shown.ending_for_mistakes():
        choose(parse_arguments(arguments))
