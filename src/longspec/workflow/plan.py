"""Answer each rule's questions about a job: its files and its settings; measuring.py has those about measured drafts.

Arguments have the names and values of wildcards. `longspec.workflow.checks.checked_plan` makes a plan.
"""

import json
from dataclasses import asdict
from pathlib import Path
from shlex import join
from typing import Any

from longspec import methods
from longspec.atomic_files import write_text
from longspec.config import to_yaml
from longspec.config.names import LOOKUP, readable_name
from longspec.config.schema import mix_of
from longspec.config.typed import OF_STAGE
from longspec.data.raw import AFTER, HUB, is_hub, is_made
from longspec.data.read import source_files
from longspec.data.read.split_records import UNANSWERED
from longspec.workflow import paths
from longspec.workflow.measuring import MeasuringPlan
from longspec.workflow.settings.targets import local_files


class Plan(MeasuringPlan):
    """Answer each question of a rule, from the choices."""

    # Records, tokens.

    @property
    def fetched_data(self) -> dict[str, dict[str, Any]]:
        """Return folder name in data/hub/ -> entry of what is fetched: datasets, and prompts of tasks."""
        data = {name: HUB | entry for name, entry in self.data.items() if is_hub(entry["source"])}
        return data | {name: asdict(task) for name, task in self.hub_prompts.items()}

    def raw_files(self, dataset: str) -> list[Any]:
        """Return the files a dataset is read from, or the manifest of what was fetched; [] for records that are made here."""
        source = self.data[dataset]["source"]
        if is_made(source):
            return []
        return [paths.HUB.format(dataset=dataset)] if is_hub(source) else source_files.files_of(source)

    def raw_settings(self, dataset: str) -> str:
        """Return the settings that make a dataset's records, as canonical JSON, without those for later steps."""
        settings = self.data[dataset]
        answered_anew = settings.get("regenerate") is not None and not is_made(settings["source"])
        unanswered = {UNANSWERED: True} if answered_anew else {}
        kept = {key: settings[key] for key in settings if key not in AFTER}
        return json.dumps(kept | unanswered, sort_keys=True)

    def shards(self, dataset: str) -> int:
        """Return the number of parts in which a dataset is tokenized."""
        return self.data[dataset]["shards"]

    def token_shards(self, model: str, dataset: str) -> list[str]:
        """Return the manifests of all token shards of a dataset."""
        names = [f"{shard:03d}" for shard in range(self.shards(dataset))]
        return [paths.TOKENS.format(model=model, dataset=dataset, shard=name) for name in names]

    # Rows: a stage's own, and those of earlier stages that it replays.

    def rows(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the manifests of the rows that a stage trains on, in the order of its data sets' names."""
        recipe = self.configs[run, variant, stage].recipe
        return [_packed(recipe, dataset) for dataset in mix_of(recipe.data.name)]

    def replayed_rows(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the manifests of the rows that a stage replays, packed like its own, in the order of their stages' names."""
        recipe = self.configs[run, variant, stage].recipe
        return [_packed(recipe, dataset) for dataset in self.replayed_data(run, variant, stage).values()]

    def replay_options(self, run: str, variant: str, stage: str, replayed: list[str]) -> list[str]:
        """Return the options for the replayed rows, each with the name of its stage."""
        names = self.replayed_data(run, variant, stage)
        named = [f"{name}={path}" for name, path in zip(names, replayed, strict=True)]
        return ["--replay", *named] if named else []

    def all_rows(self, run: str, variant: str | None = None) -> list[str]:
        """Return the manifests of all stages' own rows, of a run or of one variant of it."""
        return sorted({path for stage in self.stages_of(run, variant) for path in self.rows(*stage)})

    def trained_rows(self, run: str, variant: str | None = None) -> list[str]:
        """Return the manifests of all rows that a run trains on, or one variant of it: own and replayed ones."""
        replayed = [path for stage in self.stages_of(run, variant) for path in self.replayed_rows(*stage)]
        return sorted({*self.all_rows(run, variant), *replayed})

    # Draft vocabularies.

    def named_rows(self, run: str, variant: str) -> list[str]:
        """Return NAME=manifest of each stage's rows; NAME is the stage, for a mix stage/data set. The draft vocabulary counts
        the trained tokens of all these rows, each row once.
        """
        named = []
        for stage in self.stages_of(run, variant):
            mix = mix_of(self.configs[stage].recipe.data.name)
            names = [stage[2] if len(mix) == 1 else f"{stage[2]}{OF_STAGE}{name}" for name in mix]
            named += [f"{name}={path}" for name, path in zip(names, self.rows(*stage), strict=True)]
        return named

    def taken_vocabulary(self, run: str, variant: str, size: str) -> list[str]:
        """Return the vocabulary file to take over, of another run or of the draft to begin with; [] if this run counts."""
        if methods.vocabulary_size(self.first_recipe(run, variant)) != int(size):
            return []
        if self.init(run, variant) is not None:
            return [f"{paths.BEGINNING}/draft_vocabulary.json".format(run=run, variant=variant)]
        lender = self.lender(run, variant)
        return [] if lender is None else [vocabulary_file(*lender, int(size))]

    def vocabulary(self, run: str, variant: str) -> list[str]:
        """Return the draft vocabulary that decides weights; [] if the draft can propose all of the target's tokens."""
        size = methods.vocabulary_size(self.first_recipe(run, variant))
        return [] if size is None else [vocabulary_file(run, variant, size)]

    def vocabulary_while_drafting(self, run: str, variant: str) -> list[str]:
        """Return the draft vocabulary for decoding: the draft's own, or else the evaluation's."""
        recipe, size = self.first_recipe(run, variant), self.evaluation_of[run].section.get("draft_vocabulary")
        if size is not None and not methods.has_own_vocabulary(recipe.method.name):
            return [vocabulary_file(run, variant, size)]
        return self.vocabulary(run, variant)

    def drafter_vocabulary(self, run: str, variant: str, drafter: str) -> list[str]:
        """Return the draft vocabulary of an evaluated drafter; prompt lookup copies any token."""
        return [] if drafter == LOOKUP else self.vocabulary_while_drafting(run, variant)

    def report_vocabularies(self, run: str) -> list[str]:
        """Return the draft vocabularies that a report shows."""
        return [path for variant in self.variants[run] for path in self.vocabulary_while_drafting(run, variant)]

    # Two runs side by side.

    def compared_options(self, first: str, second: str) -> list[str]:
        """Return the options of a report on two runs: all that their own reports read, with run/variant as variant names.

        compared_page has checked that both are measured alike. The runs' gates may differ: their own reports judge by them.
        """
        both = [(run, variant) for run in (first, second) for variant in self.variants[run]]
        options = ["--settings", self.evaluation_settings(first), "--gates", json.dumps(dict.fromkeys(self.settings["gates"]))]
        options += ["--model-dir", str(Path(self.target(first)).parent)]
        options += [each for run, name in both for each in ("--variant", f"{run}/{name}=results/{run}/{name}")]
        vocabularies = [path for run, name in both for path in self.vocabulary_while_drafting(run, name)]
        options += ["--vocabulary", *vocabularies] if vocabularies else []
        for option, question in (("--raw", self.report_records), ("--packed", self.trained_rows)):
            options += [option, *sorted({*question(first), *question(second)})]
        return options

    # Targets.

    def model_source(self, model: str) -> str:
        """Return the source of a target that is not trained here."""
        return self.models[model].recipe.model.source

    def model_sha256(self, model: str) -> str | None:
        """Return the hash of a target's GGUF file, from its recipe; None: not given."""
        return self.models[model].recipe.model.sha256

    def wheel_file(self, model: str) -> list[str]:
        """Return the manifest of a target's GGUF file from a wheel; [] if the file is on this machine."""
        return [paths.WHEEL_FILE.format(model=model)] if model in self.of_wheels else []

    def sha256_option(self, model: str) -> list[str]:
        """Return the option with the GGUF file's hash, for the job that makes a target from it; [] without one."""
        sha256 = self.model_sha256(model)
        return ["--sha256", sha256] if sha256 else []

    def target(self, run: str) -> str:
        """Return the manifest of a run's target."""
        return paths.TARGET.format(model=self.model_of(run))

    def tokenizer(self, run: str) -> str:
        """Return the manifest of the tokenizer of a run's target."""
        return paths.TOKENIZER.format(model=self.model_of(run))

    def build_yaml(self, model: str) -> str:
        """Return the settings of a target that is trained here, as canonical YAML."""
        return to_yaml(self.models[model].build)

    def tokenizer_data(self, model: str) -> list[str]:
        """Return the raw records a built tokenizer is trained on: its target's, whichever runs are chosen."""
        return [paths.RAW.format(dataset=name) for name in sorted({phase["dataset"] for phase in self.mixture(model)})]

    def mixture_rows(self, model: str) -> list[str]:
        """Return the rows a built target is trained on, in the order of its phases; every token in them is a label."""
        packed = {"model": model, "collation": "base", "overlong": "split"}
        phases = self.mixture(model)
        found = [paths.PACKED.format(**packed, dataset=each["dataset"], length=each["sequence_length"]) for each in phases]
        return list(dict.fromkeys(found))

    # Drafts made elsewhere, which runs begin with.

    def draft_source(self, draft: str) -> str:
        """Return the source of a draft from its name here: hf:<owner>/<repository>[@revision] or a folder."""
        return self.beginnings[draft]

    def draft_files(self, draft: str) -> list[str]:
        """Return the files of a draft on this machine; [] for one of the hub."""
        return local_files(self.draft_source(draft))

    @property
    def begun_runs(self) -> list[str]:
        """Return the runs that begin with a draft made elsewhere, in some variant."""
        return [run for run in self.files if any(self.init(run, variant) for variant in self.variants[run])]

    def fetched_draft(self, run: str, variant: str) -> list[str]:
        """Return the manifest of the draft that a run begins with; [] for a run with a fresh draft."""
        source = self.init(run, variant)
        return [] if source is None else [paths.PUBLISHED.format(draft=readable_name(source))]

    def imported_config(self, run: str, variant: str) -> list[str]:
        """Return the config.json of the draft that a run began with, for the final draft's provenance; [] without one."""
        return [] if self.init(run, variant) is None else [f"{paths.BEGINNING}/config.json".format(run=run, variant=variant)]

    # Stages.

    def stage_yaml(self, run: str, variant: str, stage: str, section: str) -> str:
        """Return one section of a stage's configuration as canonical YAML."""
        return to_yaml(self.configs[run, variant, stage][section])

    def stage_folders(self, run: str, variant: str | None = None) -> list[str]:
        """Return the folders of all stages of a run, or of one variant of it, in order."""
        return [paths.stage_folder(*stage) for stage in self.stages_of(run, variant)]

    def stage_files(self, run: str, variant: str | None = None) -> list[str]:
        """Return the files that describe each of these stages once it is trained."""
        names = ["checkpoint.json", "metrics.jsonl", "recipe.yaml"]
        return [f"{folder}/{name}" for folder in self.stage_folders(run, variant) for name in names]

    def previous_weights(self, run: str, variant: str, stage: str) -> list[str]:
        """Return the weights a stage starts from; [] for a first stage, unless the run begins with a draft made elsewhere."""
        stages = self.stages[run]
        before = [*self.begun_with(run, variant), *stages[: stages.index(stage)]][-1:]
        return [f"{paths.stage_folder(run, variant, each)}/draft/model.safetensors" for each in before]

    def frozen(self, section: str, run: str) -> list[str]:
        """Return the recipe.yaml or the runtime.yaml of all stages of a run. section: recipe or runtime."""
        return [f"{folder}/{section}.yaml" for folder in self.stage_folders(run)]


def vocabulary_file(run: str, variant: str, size: int) -> str:
    """Return the path of a draft vocabulary."""
    return paths.DRAFT_VOCABULARY.format(run=run, variant=variant, size=size)


def _packed(recipe: Any, dataset: str) -> str:
    """Return the manifest of a dataset's rows, packed as a recipe says."""
    packed = {"collation": recipe.data.collation, "length": recipe.data.sequence_length, "overlong": recipe.data.overlong}
    return paths.PACKED.format(model=recipe.model.name, dataset=dataset, **packed)


def check_frozen(path: str, text: str) -> None:
    """Raise ValueError if a frozen file differs from the plan: no job may overwrite it.

    An empty file is reported by its readers.
    """
    found = Path(path).read_bytes() if Path(path).is_file() else b""
    if found and found != text.encode():
        raise ValueError(
            f"{path}: edited since it was frozen; change the file of the run or of config/ instead; have it made again after: "
            f"{join(['rm', path])}"
        )


def freeze_runtime(folder: str, text: str, name: str = "runtime.yaml") -> None:
    """Write a file of a job's folder before the job starts, if it is missing or differs. It is no input of the job, so that a
    change of how a stage is run does not train it again.
    """
    path = Path(folder) / name
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)
