"""Commands that measure a draft and act on its figures, `python -m longspec.measure <verb> --help`:

evaluate    measure a drafter on prompts: acceptance, speed, losslessness
choose      choose the stage whose draft is published
gates       print how a draft stands against its run's gates; an error where one failed
"""

import importlib
import sys

VERBS = ("evaluate", "choose", "gates")


def main() -> None:
    """Run one verb; each is a module of its own, so that a choice or a gate imports no torch."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb not in VERBS:
        print(__doc__, file=sys.stdout if verb in ("-h", "--help") else sys.stderr)
        sys.exit(0 if verb in ("-h", "--help") else 2)
    importlib.import_module(f"longspec.measure.{verb}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
