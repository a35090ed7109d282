"""Stored states in the plan: which stages read which, how they are built, where they lie, and when nobody needs them.

A folder of them has three names, which are wildcards: model, rows (its packed rows) and declaration (all else that decides
them and is known when a run is planned). Stages whose folders have the same names share them.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longspec import methods
from longspec.atomic_files import sha256_text
from longspec.config import OFFLINE, plain, to_yaml, yaml_files
from longspec.config.schema import mix_of
from longspec.workflow import paths
from longspec.workflow.choices import Stage
from longspec.workflow.plan import Plan, freeze_runtime

Folder = tuple[str, str, str]  # model, rows, declaration
ROOT = Path("data/states")
REMOVED = ".removed"  # the name of a folder while it is removed
HASH_LETTERS = 8


def folder_name(recipe: Any, vocabulary: str | None = None) -> str:
    """Name the folder, below those of its target and its packed rows, that all recipes share which want the same states.

    vocabulary: whatever names the draft vocabulary, such as its file; it counts where the likeliest tokens are taken from it.
    What the target's files and the rows are is held against the folder's manifests when they are read.
    """
    states, word = recipe.states, methods.settings_of(recipe.method.name).stored(recipe)
    of_vocabulary = None if states.top_k is None or methods.vocabulary_size(recipe) is None else vocabulary
    decides = [word, states.dtype, recipe.precision, states.top_k, of_vocabulary]
    return f"{word}-{states.dtype}-{sha256_text(repr(decides))[:HASH_LETTERS]}"


class StatesPlan:
    """What the rules ask of stored states; of stages that are trained online every answer is empty."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.readers: dict[Folder, list[Stage]] = {}
        self._folders_of: dict[Stage, list[Folder]] = {}  # of a stage's own rows, then of those that it replays
        self._datasets: dict[Folder, str] = {}
        for stage, config in plan.configs.items():
            if config.recipe.states.source == OFFLINE:
                self._read(stage)

    def _read(self, stage: Stage) -> None:
        """Note the folders that a stage reads."""
        recipe, (run, variant, _) = self.plan.configs[stage].recipe, stage
        decides = folder_name(recipe, self._vocabulary(run, variant))
        manifests = [*self.plan.rows(*stage), *self.plan.replayed_rows(*stage)]
        datasets = [*mix_of(recipe.data.name), *self.plan.replayed_data(*stage).values()]
        folders = [(recipe.model.name, Path(manifest).parent.name, decides) for manifest in manifests]
        self._folders_of[stage] = folders
        self._datasets |= dict(zip(folders, datasets, strict=True))
        for folder in dict.fromkeys(folders):
            self.readers.setdefault(folder, []).append(stage)

    def _vocabulary(self, run: str, variant: str) -> str | None:
        """The draft vocabulary's file; of a run that takes it over the file that was counted, so that both share."""
        size = methods.vocabulary_size(self.plan.first_recipe(run, variant))
        of_run, of_variant = self.plan.lender(run, variant) or (run, variant)
        return None if size is None else paths.DRAFT_VOCABULARY.format(run=of_run, variant=of_variant, size=size)

    # Building.

    def vocabulary(self, model: str, rows: str, declaration: str) -> list[str]:
        """The draft vocabulary that decides which tokens are the likeliest; none where the final hidden state is stored."""
        stage = self.readers[model, rows, declaration][0]
        found, top_k = self._vocabulary(*stage[:2]), self.plan.configs[stage].recipe.states.top_k
        return [] if found is None or top_k is None else [found]

    def rows_options(self, part: str = "", parts: str = "") -> list[str]:
        """Return which rows a job builds: those of a shard, or without one the held-out rows."""
        return ["--shard", part, "--num-shards", parts] if part else ["--held-out"]

    def shards(self, model: str, rows: str, declaration: str) -> list[str]:
        """The manifests of all shards: as many as the dataset is tokenized in."""
        number = self.plan.shards(self._datasets[model, rows, declaration])
        folder = _path((model, rows, declaration))
        return [f"{folder}/{part}-of-{number}/shard.json" for part in range(number)]

    def freeze(self, names: Folder, out: str, held_out: str | None = None) -> None:
        """Write recipe and runtime for a job that builds them, before it starts; both are no input of it.

        The folder's name says what of the recipe decides them. held_out: the number of rows of a job for held-out ones.
        """
        config = self.plan.configs[self.readers[names][0]]
        runtime = config.runtime.copy()
        if held_out is not None:
            OmegaConf.set_readonly(runtime, False)
            runtime.held_out_rows = int(held_out)
        freeze_runtime(out, to_yaml(config.recipe), "recipe.yaml")
        freeze_runtime(out, to_yaml(runtime))

    # Reading.

    def states(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the stage's own list of its states; none of a stage that is trained online."""
        return [str(_copy((run, variant, stage)))] if (run, variant, stage) in self._folders_of else []

    def read(self, linked: str) -> list[str]:
        """Return the shard.json of all states that a stage reads: of its own rows, of those that it replays, of held-out ones.

        linked: the stage's run, variant and name, with slashes between them.
        """
        run, variant, name = linked.split("/")
        stage = (run, variant, name)
        runtime, folders = self.plan.configs[stage].runtime, self._folders_of[stage]
        own = folders[: len(self.plan.rows(*stage))] if runtime.held_out_every else []
        held_out = [f"{_path(folder)}/held-out-{runtime.held_out_rows}/shard.json" for folder in own]
        return [shard for folder in dict.fromkeys(folders) for shard in self.shards(*folder)] + held_out

    def options(self, run: str, variant: str, stage: str, states: list[str]) -> list[str]:
        """Return the trainer's option that names these states."""
        return ["--states", *self.read(f"{run}/{variant}/{stage}")] if states else []

    # Making again and removing.

    def is_trained(self, stage: Stage) -> bool:
        """Tell whether a stage and those before it are trained, with the recipes that they have now."""
        stages = self.plan.stages_of(*stage[:2])
        for each in stages[: stages.index(stage) + 1]:
            folder, recipe = Path(paths.stage_folder(*each)), to_yaml(self.plan.configs[each].recipe)
            if not _is_done(folder) or (folder / "recipe.yaml").read_bytes() != recipe.encode():
                return False
        return True

    @property
    def linked(self) -> list[str]:
        """The stages, as {run}/{variant}/{stage}, whose list of states a job of this plan makes: those that are not trained.

        Whatever becomes of a trained one's states, Snakemake trains it again for its other inputs alone.
        """
        return ["/".join(stage) for stage in self._folders_of if not self.is_trained(stage)]

    def forget_copies(self) -> None:
        """Remove the list of each stage that is to be trained and whose states are gone; a trained one has it, perhaps empty.

        Snakemake makes an input that is there not again because what it was made of is gone: it would train without states.
        """
        for stage in self._folders_of:
            copy = _copy(stage)
            if not self.is_trained(stage):
                if not all(map(os.path.isfile, self.read("/".join(stage)))):
                    copy.unlink(missing_ok=True)
            elif not copy.exists():  # after a change that was taken back
                copy.touch()
                os.utime(copy, (0, 0))  # no newer than what was trained

    def remove_unneeded(self) -> list[Path]:
        """Remove the folders that all stages of the chosen runs are trained on; return them. None with keep_states.

        Nor those of a target whose states, with the same settings, a stage of any run is to be trained on that has begun and is
        not done: the frozen recipes under results/ tell, also while its states are being built.
        """
        if self.plan.settings.get("keep_states") or not self.readers:
            return []
        begun = [yaml_files.read(each) for each in Path("results").glob("*/*/*/recipe.yaml") if not _is_done(each.parent)]
        needed = [(recipe["model"]["name"], recipe.get("states")) for recipe in begun]
        removed, aside = [], ROOT / REMOVED  # at once: a part of a folder is of no use
        shutil.rmtree(aside, ignore_errors=True)  # what a killed call has left
        for names, readers in self.readers.items():
            folder, chosen = _path(names), [stage for stage in readers if stage[0] in self.plan.runs]
            states = plain(self.plan.configs[readers[0]].recipe)["states"]
            trained = bool(chosen) and all(map(self.is_trained, chosen))
            if folder.is_dir() and trained and (names[0], states) not in needed:
                folder.rename(aside)
                shutil.rmtree(aside)
                removed.append(folder)
        return removed


def _path(names: Folder) -> Path:
    return Path(paths.STATES.format(model=names[0], rows=names[1], declaration=names[2]))


def _copy(stage: Stage) -> Path:
    return Path(paths.STAGE_STATES.format(linked="/".join(stage)))


def _is_done(folder: Path) -> bool:
    """Whether a stage was trained since its recipe was frozen."""
    recipe, checkpoint = folder / "recipe.yaml", folder / "checkpoint.json"
    return recipe.is_file() and checkpoint.is_file() and recipe.stat().st_mtime_ns <= checkpoint.stat().st_mtime_ns
