"""longspec: from a target and its data to a draft that is measured, tried and served.

In a clone of the repository, whose Snakefile it calls; `try`, `export` and `push` work anywhere.
"""

import argparse
import os
import sys
from importlib import import_module

from longspec import shown
from longspec.command_line import add_verb

WITH_TORCH = {  # verbs with a module of their own: the others do without torch
    "new": ("longspec.cli.new", "write a run's file for a target and its data, plan it, and say hours, memory and disk"),
    "try": ("longspec.cli.side_by_side", "the same text twice as it comes: without and with the draft"),
    "serve": ("longspec.cli.serve", "target and draft in vLLM, its acceptance beside ours"),
}
PASSED_ON: dict[str, tuple[list[str], str]] = {  # verbs of other rooms: module and verb, what they do
    "status": (["longspec.cluster", "status"], "all stages: steps, speed, time left, last checkpoint, Slurm job"),
    "resume": (["longspec.cluster", "resume"], "after Snakemake itself was killed: wait for its Slurm jobs, unlock, go on"),
    "export": (["longspec.draft", "export"], "write a draft in another layout"),
    "push": (["longspec.draft", "push"], "upload a draft to the hub, with a model card"),
    "inspect": (["longspec.data", "inspect"], "see what a draft is trained on"),
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    whole = argparse.ArgumentParser(prog="longspec", description=__doc__)
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")
    first, *later = WITH_TORCH
    add_verb(verbs, first, WITH_TORCH[first][1])
    for name, purpose in (
        ("plan", "what would run, and why"),
        ("train", "make the draft; what is done is kept"),
        ("report", "print what came out"),
    ):
        verb = add_verb(verbs, name, purpose)
        verb.add_argument("run", help="a run: a name of config/run/, or a file")
        if name != "report":
            verb.add_argument("snakemake", nargs=argparse.REMAINDER, help="options of Snakemake, such as --profile slurm")
    for name in (*later, *PASSED_ON):
        add_verb(verbs, name, (WITH_TORCH | PASSED_ON)[name][1])
    return whole


def main(argv: list[str] | None = None) -> None:
    """Run a verb; an error is one line."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] and given[0] in PASSED_ON:
        os.execv(sys.executable, [sys.executable, "-m", *PASSED_ON[given[0]][0], *given[1:]])
    try:
        if given[:1] and given[0] in WITH_TORCH:
            verb = import_module(WITH_TORCH[given[0]][0])
            one = argparse.ArgumentParser(prog=f"longspec {given[0]}", description=verb.__doc__)
            verb.add_arguments(one)
            end = given.index("--") if "--" in given else len(given)  # behind it: options of the program that serves
            sys.exit(verb.run(one.parse_args(given[1:end], argparse.Namespace(more=given[end + 1 :]))))
        from longspec.cli import runs

        options = parser().parse_args(given)
        sys.exit(getattr(runs, options.verb)(options))
    except (ValueError, OSError) as error:
        print(shown.error(error), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
