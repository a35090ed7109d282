"""Stored states in the plan: which stages read which, how they are built, where they lie, and when nobody needs them.

A folder of them has three names, which are wildcards: model, rows (its packed rows) and declaration (all else that decides
them and is known when a run is planned). Stages whose folders have the same names share them.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longspec import methods
from longspec.atomic_files import fsync_path
from longspec.config import OFFLINE, to_yaml, yaml_files
from longspec.states.folder_name import folder_name
from longspec.states.holds import COPY, hold, needed_by, put_back, set_aside
from longspec.workflow import paths
from longspec.workflow.choices import Stage
from longspec.workflow.plan import Plan, freeze_runtime

Folder = tuple[str, str, str]  # model, rows, declaration
ROOT = Path("data/states")
PLACE = "states_folder"  # of config/workflow.yaml: a folder that ROOT becomes a link to


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
        manifests = [self.plan.rows(*stage), *self.plan.replayed_rows(*stage)]
        datasets = [recipe.data.name, *self.plan.replayed_data(*stage).values()]
        folders = [(recipe.model.name, Path(manifest).parent.name, decides) for manifest in manifests]
        self._folders_of[stage] = folders
        self._datasets |= dict(zip(folders, datasets, strict=True))
        for folder in dict.fromkeys(folders):
            self.readers.setdefault(folder, []).append(stage)

    @property
    def rows(self) -> list[str]:
        """The names of the packed rows whose states are stored."""
        return sorted({rows for _, rows, _ in self.readers})

    @property
    def declarations(self) -> list[str]:
        """The last names of all folders."""
        return sorted({declaration for _, _, declaration in self.readers})

    def _vocabulary(self, run: str, variant: str) -> str | None:
        """The draft vocabulary's file; of a run that takes it over the file that was counted, so that both share."""
        size, at = methods.vocabulary_size(self.plan.first_recipe(run, variant)), (run, variant)
        while (lender := self.plan.lender(*at)) is not None:
            at = lender
        return None if size is None else paths.DRAFT_VOCABULARY.format(run=at[0], variant=at[1], size=size)

    # The place of them all.

    @property
    def _configured(self) -> Path | None:
        configured = self.plan.settings.get(PLACE)
        return None if configured is None or not self.readers else Path(configured).expanduser().absolute()

    @property
    def disk(self) -> Path:
        """The folder on whose disk states are stored, or the first one above it that is there."""
        wanted = (self._configured or ROOT).resolve()
        return next(path for path in (wanted, *wanted.parents) if path.is_dir())

    def check_place(self) -> None:
        """Raise ValueError where data/states cannot become a link to the configured folder, since it is something else."""
        configured = self._configured
        above = next((path for path in [configured, *configured.parents] if path.exists()), None) if configured else None
        if above is not None and not above.is_dir():
            raise ValueError(f"config/workflow.yaml: {PLACE}: {configured}: {above} is a file; name a folder")
        if configured is None or (not ROOT.is_symlink() and not ROOT.exists()) or ROOT.resolve() == configured.resolve():
            return
        is_link = ROOT.is_symlink()
        there = f"a link to {ROOT.readlink()}" if is_link else "a folder"
        fix = f"rm {ROOT}" if is_link else f"mv {ROOT}/* {configured}/ && rmdir {ROOT}, or rm -r {ROOT}"
        raise ValueError(f"config/workflow.yaml: {PLACE}: {configured}: {ROOT} is {there} already; change that first: {fix}")

    def make_place(self) -> None:
        """Make data/states a link to the configured folder: paths, which Snakemake records, stay when the disk changes."""
        configured = self._configured
        if configured is None or ROOT.is_symlink():
            return
        configured.mkdir(parents=True, exist_ok=True)
        ROOT.parent.mkdir(parents=True, exist_ok=True)
        ROOT.symlink_to(configured)
        fsync_path(ROOT.parent)

    # Building.

    def vocabulary(self, model: str, rows: str, declaration: str) -> list[str]:
        """The draft vocabulary that decides which tokens are the likeliest; none where the final hidden state is stored."""
        run, variant, stage = self.readers[model, rows, declaration][0]
        found = self._vocabulary(run, variant)
        top_k = self.plan.configs[run, variant, stage].recipe.states.top_k
        return [] if found is None or top_k is None else [found]

    def rows_options(self, part: str = "", parts: str = "") -> list[str]:
        """Which rows a job builds: those of a shard, or without one the held-out rows."""
        return ["--shard", part, "--num-shards", parts] if part else ["--held-out"]

    def shards(self, model: str, rows: str, declaration: str) -> list[str]:
        """The manifests of all shards: as many as the dataset is tokenized in."""
        number = self.plan.shards(self._datasets[model, rows, declaration])
        folder = paths.STATES.format(model=model, rows=rows, declaration=declaration)
        return [f"{folder}/{part}-of-{number}/shard.json" for part in range(number)]

    def config_of(self, names: Folder) -> Any:
        """The configuration of a stage that reads a folder, as if its rows were the stage's own, to estimate by."""
        stage = self.readers[names][0]
        config, place = self.plan.configs[stage], self._folders_of[stage].index(names)
        if place:
            config = copy.deepcopy(config)
            OmegaConf.set_readonly(config, False)
            name = list(self.plan.replayed_data(*stage))[place - 1]
            config.recipe.data.replay = {name: 1 - config.recipe.data.replay[name]}  # all rows but these
        return config

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

    @property
    def linked(self) -> list[str]:
        """The stages, as {run}/{variant}/{stage}, whose states a job of this plan makes.

        Not those that are trained and whose states are gone: where another stage has the same ones made again, Snakemake would
        train them again.
        """
        return ["/".join(stage) for stage in self._folders_of if not self._is_cut_off(stage)]

    def forget_removed(self) -> None:
        """Set aside the copies of contents.json, below, whose states are gone, of stages that would have them made again.

        Snakemake makes an input that is there not again because what it was made of is gone: it would train without states.
        The note of a held stage, that it needs them no more, is removed: where it is not trained after all, it is released.
        """
        for run, variant, name in self._folders_of:
            stage = run, variant, name
            if not self._are_there(stage):
                put_back(_stage_folder(stage))
                if not self._is_cut_off(stage):
                    set_aside(_stage_folder(stage))
            if self._is_held(stage):
                Path(paths.REMOVED_STATES.format(run=run, variant=variant, stage=name)).unlink(missing_ok=True)

    def _is_cut_off(self, stage: Stage) -> bool:
        of_stage = _stage_folder(stage)
        recipe = of_stage / "recipe.yaml"
        return (
            (of_stage / "checkpoint.json").is_file()
            and (of_stage / COPY).is_file()
            and recipe.is_file()
            and recipe.read_bytes() == to_yaml(self.plan.configs[stage].recipe).encode()
            and not self._are_there(stage)
            and not self._is_held(stage)
        )

    def _is_held(self, stage: Stage) -> bool:
        return any(reader(stage) in needed_by(folder) for folder in self._folders(stage))

    def _are_there(self, stage: Stage) -> bool:
        return all((folder / "contents.json").is_file() for folder in self._folders(stage))

    def contents(self, linked: str) -> list[str]:
        """The contents.json of the states that a stage is trained on, of those of its held-out rows, if it measures any, and
        of those of the rows that it replays.

        linked: the stage's run, variant and name, with slashes between them.
        """
        run, variant, name = linked.split("/")
        own, *replayed = self._folders((run, variant, name))
        number = self._held_out_rows((run, variant, name))
        held_out = [own / f"held-out-{number}"] if number else []
        return [f"{folder}/contents.json" for folder in (own, *held_out, *replayed)]

    def states(self, run: str, variant: str, stage: str) -> list[str]:
        """The stage's own copy of that; none of a stage that is trained online."""
        offline = (run, variant, stage) in self._folders_of
        return [paths.STAGE_STATES.format(linked=f"{run}/{variant}/{stage}")] if offline else []

    def options(self, run: str, variant: str, stage: str, states: list[str]) -> list[str]:
        """The trainer's options that name these states."""
        if not states:
            return []
        contents = self.contents(f"{run}/{variant}/{stage}")
        names = list(self.plan.replayed_data(run, variant, stage))
        found = [str(Path(path).with_name("manifest.json")) for path in contents]
        of_stage, replayed = found[: len(found) - len(names)], found[len(found) - len(names) :]
        options = [word for pair in zip(("--states", "--held-out-states"), of_stage, strict=False) for word in pair]
        named = [f"{name}={path}" for name, path in zip(names, replayed, strict=True)]
        return [*options, "--replay-states", *named] if named else options

    def _folders(self, stage: Stage) -> list[Path]:
        """The folders that a stage reads, that of its own rows first."""
        named = [dict(zip(("model", "rows", "declaration"), names, strict=True)) for names in self._folders_of[stage]]
        return [Path(paths.STATES.format(**names)) for names in named]

    def _held_out_rows(self, stage: Stage) -> int:
        """The number of held-out rows that a stage measures on; for a finished one that of its frozen runtime, since `runtime`
        trains nothing again.
        """
        frozen = _stage_folder(stage) / "runtime.yaml"
        if frozen.with_name("checkpoint.json").is_file() and frozen.is_file():
            trained: Any = yaml_files.read(frozen)
            if isinstance(trained, dict) and trained.keys() >= {"held_out_every", "held_out_rows"}:
                return int(trained["held_out_rows"] if trained["held_out_every"] else 0)
        return self._wanted_rows(stage)

    def _wanted_rows(self, stage: Stage) -> int:
        runtime = self.plan.configs[stage].runtime
        return int(runtime.held_out_rows if runtime.held_out_every else 0)

    # Keeping and removing.

    def hold(self, stages: Iterable[Stage]) -> None:
        """Keep the states of stages that are about to be trained, until each is done.

        Raises ValueError for a trained stage that is to be trained again, and whose states this plan does not make.
        """
        trained = sorted(set(stages) & self._folders_of.keys())
        for stage in trained:
            path, planned, wanted = _stage_folder(stage), self._held_out_rows(stage), self._wanted_rows(stage)
            if planned != wanted:
                raise ValueError(
                    f"{path}: is to be trained again, and the number of its held-out rows (runtime.held_out_rows, 0 without "
                    f"runtime.held_out_every) is {wanted} now, was {planned}; remove {path}/checkpoint.json and start again"
                )
        gone = [stage for stage in trained if self._is_cut_off(stage)]
        for stage in gone or trained:  # a call that ends here builds nothing for the others
            for folder in self._folders(stage):
                hold(folder, reader(stage))
        if gone:
            raise ValueError(
                f"{', '.join(str(_stage_folder(stage)) for stage in gone)}: must be trained again, and the stored states were "
                "removed; start the same command again, which builds them first"
            )

    def removed(self) -> list[str]:
        """The notes of all stages of the chosen runs that their states are needed no more; none with keep_states."""
        if self.plan.settings.get("keep_states"):
            return []
        stages = [stage for run in self.plan.runs for stage in self.plan.stages_of(run, None) if stage in self._folders_of]
        return [paths.REMOVED_STATES.format(run=run, variant=variant, stage=stage) for run, variant, stage in stages]

    def removal_options(self, run: str, variant: str, stage: str, checkpoint: str) -> list[str]:
        """How a stage says that it needs its states no more. checkpoint: its input; so Snakemake does not record the answer."""
        folders = [str(folder) for folder in dict.fromkeys(self._folders((run, variant, stage)))]
        return ["--folder", *folders, "--reader", reader((run, variant, stage))]


def reader(stage: Stage) -> str:
    """A stage as one word: no name has an underscore."""
    return "_".join(stage)


def _stage_folder(stage: Stage) -> Path:
    return Path(paths.stage_folder(*stage))


def stored_rows(folder: Path) -> int:
    """Count the rows of a shard that is being built which are in its files."""
    names = [path.stem.split("-") for path in folder.glob("rows-*.safetensors")]
    return sum(int(last) - int(first) + 1 for _, first, last in names)
