"""`python -m longspec.report`: one self-contained HTML page about a run or two, and its numbers as JSON beside it."""

import argparse
import json
from pathlib import Path

from longspec import shown
from longspec.atomic_files import read_json, write_json, write_text
from longspec.measure.tasks import parse
from longspec.report.acceptance_file import store_acceptance
from longspec.report.inputs import read_target, read_variant, records_that_chose
from longspec.report.numbers import report_numbers
from longspec.report.page import render
from longspec.shown import named_path

EVALUATIONS = "evaluation"  # the folder of a run's own measurements; others are measured apart


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m longspec.report", description=__doc__)
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--variant", required=True, action="append", type=named_path, help="[RUN/]NAME=FOLDER; repeat it")
    parser.add_argument(
        "--vocabulary", default=[], nargs="*", type=Path, help="draft vocabularies, each in its variant's folder"
    )
    parser.add_argument("--evaluations", default=EVALUATIONS, metavar="NAME", help="folder of the measurements in a variant's")
    parser.add_argument("--settings", required=True, type=json.loads, help="the evaluation section as JSON")
    parser.add_argument("--gates", required=True, type=json.loads, help="the gates section as JSON")
    parser.add_argument("--model-dir", required=True, type=Path, help="folder of target_manifest.json")
    parser.add_argument("--raw", required=True, nargs="+", type=Path, help="manifests of raw datasets")
    parser.add_argument("--answers", default=[], nargs="*", type=Path, help="manifests of answers by the target")
    parser.add_argument("--packed", required=True, nargs="+", type=Path, help="manifests of packed rows")
    parser.add_argument("--out", required=True, type=Path, help="the page; the numbers go beside it as .json")
    return parser.parse_args(arguments)


def make_report(options: argparse.Namespace) -> None:
    """Read everything, then write acceptance files next to the drafts, the numbers and the page."""
    settings = parse(options.settings)
    target = read_target(options.model_dir)
    vocabularies = {path.resolve().parent: path for path in options.vocabulary}
    for stray in vocabularies.keys() - {folder.resolve() for _, folder in options.variant}:
        raise ValueError(f"--vocabulary: {vocabularies[stray]}: lies in no --variant's folder; give the folder it belongs to")
    records = records_that_chose(folder for _, folder in options.variant)
    variants = [
        read_variant(name, folder, settings, vocabularies.get(folder.resolve()), options.evaluations, records)
        for name, folder in options.variant
    ]
    raw, packed, answered = (list(map(read_json, paths)) for paths in (options.raw, options.packed, options.answers))
    numbers = report_numbers(options.run, variants, settings, options.gates)
    page = render(variants, numbers, settings, target, raw, packed, answered)
    for variant in variants:
        if variant.vocabulary is not None and (warning := variant.vocabulary.low_coverage):
            print(f"WARNING {variant.name}: {warning}")
    # Decoding chooses chains by a run's own measurements, so a page about several runs writes no acceptance files.
    if options.evaluations == EVALUATIONS and len({folder.resolve().parent for _, folder in options.variant}) == 1:
        for variant, (_, folder) in zip(variants, options.variant, strict=True):
            store_acceptance(folder, variant, settings)
    beside = options.out.with_suffix(".json")
    write_json(beside, numbers)
    write_text(options.out, page)
    print(f"{options.out}: {len(page):,} characters; numbers in {beside}")


def main() -> None:
    with shown.ending_for_mistakes():
        make_report(parse_arguments())


if __name__ == "__main__":
    main()
