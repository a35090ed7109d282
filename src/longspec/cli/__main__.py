"""longspec: from a target and its data to a draft that is measured, tried and served.

In a clone of the repository, whose Snakefile it calls; `try`, `export` and `push` work anywhere.
"""

import argparse
import os
import sys
from importlib import import_module

from longspec import shown

PLANNED = {"plan": "what would run, and why", "train": "make the draft; what is done is kept", "report": "print what came out"}
OWN = {  # verbs with a module of their own, which loads torch: the others do without
    "new": ("longspec.cli.new", "write a run's file for a target and its data, plan it, and say hours, memory and disk"),
    "try": ("longspec.cli.side_by_side", "the same text twice as it comes: without and with the draft"),
    "serve": ("longspec.cli.serve", "target and draft in vLLM, its acceptance beside ours; or what to type for llama.cpp"),
}
PASSED_ON = {  # verbs of other rooms
    "status": ("longspec.cluster", "all stages: steps, speed, time left, last checkpoint, Slurm job"),
    "resume": ("longspec.cluster", "after Snakemake itself was killed: wait for its Slurm jobs, unlock, go on"),
    "export": ("longspec.draft", "write a draft in another layout"),
    "push": ("longspec.draft", "upload a draft to the hub, with a model card"),
    "inspect": ("longspec.data", "see what a draft is trained on"),
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    whole = argparse.ArgumentParser(prog="longspec", description=__doc__)
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")
    elsewhere = {name: purpose for name, (_, purpose) in (OWN | PASSED_ON).items()}
    for name, purpose in ({"new": elsewhere["new"]} | PLANNED | elsewhere).items():
        verb = verbs.add_parser(name, help=purpose, description=purpose)
        if name in PLANNED:
            verb.add_argument("run", help="a run: a name of config/run/, or a file")
        if name in ("plan", "train"):
            verb.add_argument("snakemake", nargs=argparse.REMAINDER, help="options of Snakemake, such as --profile slurm")
    return whole


def main(argv: list[str] | None = None) -> None:
    """Run a verb; print an error in one line."""
    given = sys.argv[1:] if argv is None else argv
    name = given[0] if given else ""
    if name in PASSED_ON:
        os.execv(sys.executable, [sys.executable, "-m", PASSED_ON[name][0], *given])
    try:
        if name in OWN:
            verb = import_module(OWN[name][0])
            one = argparse.ArgumentParser(prog=f"longspec {name}", description=verb.__doc__)
            verb.add_arguments(one)
            end = given.index("--") if "--" in given else len(given)  # behind it: options of the program that serves
            sys.exit(verb.run(one.parse_args(given[1:end], argparse.Namespace(more=given[end + 1 :]))))
        from longspec.cli import runs

        options = parser().parse_args(given)
        sys.exit(getattr(runs, options.verb)(options))
    except (ValueError, OSError) as error:
        print(shown.error(error), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped by you", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
