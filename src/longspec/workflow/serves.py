"""Plan `snakemake serves`: the final draft by our own loop and by each engine, with the same greedy chains on the same prompts.

An engine is measured if its environment exists and it loads the method's drafts. A task that it cannot represent, such as texts
longer than the draft's window, is left out for it. The page lists the other engines with the reason.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from longspec import methods
from longspec.config.names import FINAL, WITH_LOOKUP
from longspec.engines import ENGINES, OURS, Engine
from longspec.workflow import paths
from longspec.workflow.plan import Plan

CHAIN = 3  # drafted tokens of a round, if the evaluation measures no chain
# Keys of the evaluation that also apply here.
SHARED = ("prompts", "new_tokens", "seed")


@dataclass(frozen=True)
class Standing:
    """Hold how an engine is measured with a draft: by this evaluation section, or not, and why.

    left_out: task -> why this engine is not measured on it.
    """

    section: dict[str, Any] | None
    why: str = ""
    left_out: dict[str, str] = field(default_factory=dict)


class ServesPlan:
    """Answer the questions of the rules for `snakemake serves`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def pages(self) -> list[str]:
        """Return each chosen run's page, the file that says that its gate passed, and the measurements.

        If a user removes a measurement, it is then made again, and the page too.
        """
        pages = [each.format(run=run, measured="serves") for run in self.plan.runs for each in (paths.PAGE, paths.SERVES_GATES)]
        return pages + [path for run in self.plan.runs for path in self.evaluations(run)]

    def evaluations(self, run: str) -> list[str]:
        """Return the measurements that a run's page shows."""
        return [
            paths.MEASURED.format(run=run, variant=variant, measured="serves", drafter=engine)
            for variant in self.plan.variants[run]
            for engine, standing in self.standings(run, variant).items()
            if standing.section is not None
        ]

    # For a measurement by an engine, whose name takes the place of a drafter's.

    def evaluation_settings(self, run: str, variant: str, drafter: str) -> str:
        """Return the evaluation section of one measurement as canonical JSON."""
        return json.dumps(self.standings(run, variant)[drafter].section, sort_keys=True)

    def drafter_weights(self, run: str, variant: str) -> list[str]:
        """Return the files of the published draft."""
        return self.plan.drafter_weights(run, variant, WITH_LOOKUP)

    def drafter_vocabulary(self, run: str, variant: str) -> list[str]:
        """Return all tokens that the draft was trained to propose; engines cannot use fewer."""
        return self.plan.vocabulary(run, variant)

    def drafter_options(self, drafter: str, draft: list[str]) -> list[Any]:
        """Return the evaluation's options for the published draft; an engine's refusal is written as a result for the page."""
        return [*self.plan.drafter_options(FINAL, draft), *(["--keep-fault"] if drafter != OURS else [])]

    def page_settings(self, run: str) -> str:
        """Return every engine's standing, by variant, as JSON in the order of the page."""
        found = {variant: self.standings(run, variant) for variant in self.plan.variants[run]}
        return json.dumps({variant: {name: asdict(each) for name, each in held.items()} for variant, held in found.items()})

    def standings(self, run: str, variant: str) -> dict[str, Standing]:
        """Return engine name -> its standing with a variant's draft, our own loop first."""
        evaluation = self.plan.evaluation_of[run]
        chains = [shape for shape in evaluation.section["shapes"] if isinstance(shape, int)]
        section = {key: evaluation.section[key] for key in SHARED if evaluation.section.get(key) is not None}
        section |= {"temperatures": [0], "shapes": [(chains or [CHAIN])[0]], "repeats": 1, "tasks": evaluation.section["tasks"]}
        others = {name: self._standing(run, variant, engine, section) for name, engine in ENGINES.items()}
        return {OURS: Standing(section), **others}

    def _standing(self, run: str, variant: str, engine: Engine, section: dict[str, Any]) -> Standing:
        """Return another engine's standing. section: our own loop's evaluation section."""
        evaluation, recipe = self.plan.evaluation_of[run], self.plan.first_recipe(run, variant)
        named = self.plan.files[run].given
        loading = [each for each in ENGINES.values() if each.name in methods.settings_of(recipe.method.name).SERVED]
        if engine not in loading:
            names = " or ".join(each.title for each in loading)
            draft = paths.FINAL_DRAFT.format(run=run, variant=variant)
            command = f"longspec serve {named} --engine {loading[0].name}" if loading else f"longspec try {draft}"
            return Standing(None, f"loads no {recipe.method.name} drafts{f'; use {names}' * bool(loading)}: `{command}`")
        layout, left_out = methods.served(recipe.method.name, engine.name).layout, {}
        for name, task in evaluation.tasks.items():
            try:
                engine.check_beside(recipe.model.family)
                methods.check_layout(recipe.method.name, recipe.method, layout, task.most_tokens + section["shapes"][0])
                methods.check_chain(recipe, section["shapes"][0])
            except ValueError as error:
                left_out[name] = str(error)
        if len(left_out) == len(evaluation.tasks):
            return Standing(None, f"cannot represent this draft: {next(iter(left_out.values()))}")
        is_chosen = evaluation.section.get("engine") == engine.name
        given = evaluation.section.get("serve_python") if is_chosen else None
        if not os.access(given or engine.python, os.X_OK):
            return Standing(None, f"is not installed: {engine.install}, then `snakemake serves --config run={named}`")
        own = {"engine": engine.name} | ({"serve_python": given} if given else {})
        tasks = {name: each for name, each in section["tasks"].items() if name not in left_out}
        return Standing(section | own | {"tasks": tasks}, left_out=left_out)
