"""Commands that measure a draft and act on its figures, `python -m longspec.measure <verb> --help`:

evaluate    measure a drafter on prompts: acceptance, speed, losslessness
choose      choose the stage whose draft is published
gates       print how a draft stands against its run's gates; an error where one failed
"""

from functools import partial

from longspec.shown import run_verb

VERBS = ("evaluate", "choose", "gates")
main = partial(run_verb, "measure", VERBS, __doc__)

if __name__ == "__main__":
    main()
