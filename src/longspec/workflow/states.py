"""Plan stored states: which stages read which, how they are built, where they are, and when nobody needs them.

A folder of states has three names, which are wildcards: model, rows (its packed rows) and declaration (everything else that
decides the states and is known during planning). Stages whose folders have the same names share them.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.atomic_files import sha256_text
from longspec.config import OFFLINE, plain, yaml_files
from longspec.config.schema import mix_of
from longspec.methods.draft_files import weights_hash
from longspec.train import stage_folder
from longspec.workflow import paths
from longspec.workflow.choices import Stage
from longspec.workflow.plan import Plan, freeze_runtime, vocabulary_file


def folder_name(recipe: Any, vocabulary: str | None = None) -> str:
    """Return the last part of a states folder's name; recipes that need the same states get the same name.

    vocabulary: anything that names the draft vocabulary, such as its file; used only if the likeliest tokens come from it.
    The target's files and the rows are compared with the folder's manifests when these are read.
    """
    states, word = recipe.states, methods.settings_of(recipe.method.name).stored(recipe)
    of_vocabulary = None if states.top_k is None or methods.vocabulary_size(recipe) is None else vocabulary
    decides = [word, states.dtype, recipe.precision, states.top_k, of_vocabulary]
    return f"{word}-{states.dtype}-{sha256_text(repr(decides))[:8]}"


class StatesPlan:
    """Answer the rules' questions about stored states; for stages that train online every answer is empty.

    readers: a folder's path -> the stages that read it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.readers: dict[str, list[Stage]] = {}
        offline = [stage for stage, config in plan.configs.items() if config.recipe.states.source == OFFLINE]
        self._folders = {stage: self._folders_of(stage) for stage in offline}
        for stage, folders in self._folders.items():
            for folder in folders:
                self.readers.setdefault(folder, []).append(stage)

    def _folders_of(self, stage: Stage) -> dict[str, int]:
        """Return folder -> number of shards, for a stage's own rows and then for replayed ones."""
        recipe = self.plan.configs[stage].recipe
        names = {"model": recipe.model.name, "declaration": folder_name(recipe, next(iter(self._vocabulary(stage)), None))}
        manifests = [*self.plan.rows(*stage), *self.plan.replayed_rows(*stage)]
        datasets = [*mix_of(recipe.data.name), *self.plan.replayed_data(*stage).values()]
        folders = [paths.STATES.format(rows=Path(manifest).parent.name, **names) for manifest in manifests]
        return dict(zip(folders, map(self.plan.shards, datasets), strict=True))

    def _vocabulary(self, stage: Stage) -> list[str]:
        """Return the draft vocabulary's file; a run that takes over a vocabulary uses the lender's file, so that both share."""
        run, variant, _ = stage
        size = methods.vocabulary_size(self.plan.first_recipe(run, variant))
        return [] if size is None else [vocabulary_file(*(self.plan.lender(run, variant) or (run, variant)), size)]

    # Building.

    def vocabulary(self, model: str, rows: str, declaration: str) -> list[str]:
        """Return the draft vocabulary that decides the likeliest tokens; [] if the final hidden state is stored."""
        stage = self.readers[paths.STATES.format(model=model, rows=rows, declaration=declaration)][0]
        return [] if self.plan.configs[stage].recipe.states.top_k is None else self._vocabulary(stage)

    def freeze(self, out: str) -> None:
        """Write recipe and runtime to the folder of a job that builds states, before it starts; they are no inputs of the job.

        The parent folder's name covers what in the recipe decides the states.
        """
        for section in ("recipe", "runtime"):
            text = self.plan.stage_yaml(*self.readers[str(Path(out).parent)][0], section)
            freeze_runtime(out, text, f"{section}.yaml")

    # Reading.

    def states(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the stage's own list of its states; [] for a stage that trains online."""
        linked = f"{run}/{variant}/{stage}"
        return [paths.STAGE_STATES.format(linked=linked)] if (run, variant, stage) in self._folders else []

    def read(self, linked: str) -> list[str]:
        """Return the shard.json of all states that a stage reads: of its own rows, of replayed rows, and of held-out ones.

        linked: the stage as run/variant/stage.
        """
        run, variant, name = linked.split("/")
        stage = (run, variant, name)
        runtime, folders = self.plan.configs[stage].runtime, self._folders[stage]
        parts = [f"{folder}/{part}-of-{number}" for folder, number in folders.items() for part in range(number)]
        own = [*folders][: len(self.plan.rows(*stage))] if runtime.held_out_every else []
        return [f"{part}/shard.json" for part in (*parts, *(f"{folder}/held-out-{runtime.held_out_rows}" for folder in own))]

    def options(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the trainer's option with these states."""
        return ["--states", *self.read(f"{run}/{variant}/{stage}")] if self.states(run, variant, stage) else []

    # Making again and removing.

    def is_trained(self, stage: Stage) -> bool:
        """Tell whether a stage and all before it are trained, with their current recipes."""
        stages, weights = self.plan.stages_of(*stage[:2]), None
        for each in stages[: stages.index(stage) + 1]:
            folder = Path(paths.stage_folder(*each))
            # Not by dates: a recipe that was edited and frozen, and is edited back, was trained all the same.
            if not stage_folder.is_trained(folder, plain(self.plan.configs[each].recipe), weights):
                return False
            weights = weights_hash(folder / "draft")
        return True

    @property
    def linked(self) -> list[str]:
        """Return the stages, as run/variant/stage, whose list of states a job of this plan makes: those that are not trained.

        A trained stage is not trained again if its states change, only if other inputs do.
        """
        return ["/".join(stage) for stage in self._folders if not self.is_trained(stage)]

    def forget_copies(self) -> None:
        """Remove an untrained stage's list of states if its states are gone; give a trained stage an empty list if it has none.

        Snakemake does not remake an existing input whose own inputs are gone: the stage would train without states.
        """
        for stage in self._folders:
            copy = Path(*self.states(*stage))
            if not self.is_trained(stage):
                if not all(map(os.path.isfile, self.read("/".join(stage)))):
                    copy.unlink(missing_ok=True)
            elif not copy.exists():  # after a change was undone
                copy.touch()
                os.utime(copy, (0, 0))  # older than anything that was trained

    def remove_unneeded(self) -> list[str]:
        """Remove and return the folders of states whose stages of the chosen runs are all trained; none with keep_states.

        Keep states of a target if an unfinished stage of any run needs states of the target with the same settings. The frozen
        recipes under results/ show this, even while the states are being built.
        """
        if self.plan.settings.get("keep_states") or not self.readers:
            return []
        frozen = {each.parent: yaml_files.read(each) for each in Path("results").glob("*/*/*/recipe.yaml")}
        begun = [recipe for folder, recipe in frozen.items() if not stage_folder.is_trained(folder, recipe)]
        needed = [(recipe["model"]["name"], recipe.get("states")) for recipe in begun]
        removed = []
        for folder, readers in self.readers.items():
            recipe, chosen = self.plan.configs[readers[0]].recipe, [stage for stage in readers if stage[0] in self.plan.runs]
            trained = bool(chosen) and all(map(self.is_trained, chosen))
            if Path(folder).is_dir() and trained and (recipe.model.name, plain(recipe)["states"]) not in needed:
                for shard in Path(folder).glob("*/shard.json"):  # first: a killed call must not leave a shard without its rows
                    shard.unlink()
                shutil.rmtree(folder)
                removed.append(folder)
        return removed
