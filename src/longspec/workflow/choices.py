"""Hold all choices: runs, variants, stages and targets, datasets and tasks, and which of them is used for what."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspec import methods
from longspec.config.checks import BUILT
from longspec.config.names import BASELINES, IMPORTED, WHEEL_PREFIX, WITH_LOOKUP, is_gguf, readable_name
from longspec.config.run_file import Run, name_of
from longspec.config.schema import mix_of
from longspec.config.typed import OF_STAGE
from longspec.measure.tasks import HeldOut
from longspec.workflow.settings.evaluations import RunEvaluation

Stage = tuple[str, str, str]  # run, variant, stage


@dataclass(frozen=True)
class Choices:
    """Hold all choices: for the chosen runs, and for the runs that lend them a draft vocabulary.

    settings: of config/workflow.yaml, presets expanded; files, variants: of each run, in order; configs: composed
    configurations by (run, variant, stage); evaluation_of: how each chosen run is measured.
    """

    settings: dict[str, Any]
    files: dict[str, Run]
    variants: dict[str, list[str]]
    configs: dict[Stage, Any]
    evaluation_of: dict[str, RunEvaluation]

    # Names: values of the wildcards.

    @property
    def runs(self) -> list[str]:
        """Return the chosen runs."""
        return self.settings["runs"]

    @cached_property
    def stages(self) -> dict[str, list[str]]:
        """Return the stages of each run, in order."""
        return {name: list(run.says.stages) for name, run in self.files.items()}

    @property
    def data(self) -> dict[str, Any]:
        return self.settings["data"]

    @property
    def drafters(self) -> list[str]:
        """Return the names of all that may be evaluated: baselines, every stage, the published draft with prompt lookup."""
        imported = [IMPORTED] if self.beginnings else []
        return [*BASELINES, *imported, *(stage for stages in self.stages.values() for stage in stages), WITH_LOOKUP]

    @property
    def models(self) -> dict[str, Any]:
        """Return target name -> the configuration of one of its stages."""
        return {config.recipe.model.name: config for config in self.configs.values()}

    @property
    def built(self) -> list[str]:
        """Return the targets that are trained here."""
        return [name for name, config in self.models.items() if config.recipe.model.source == BUILT]

    @property
    def of_gguf(self) -> list[str]:
        """Return the targets that are made from GGUF files."""
        return [name for name, config in self.models.items() if is_gguf(config.recipe.model.source)]

    @property
    def of_wheels(self) -> list[str]:
        """Return those of them whose GGUF files come from wheels."""
        return [name for name in self.of_gguf if self.models[name].recipe.model.source.startswith(WHEEL_PREFIX)]

    @property
    def fetched(self) -> list[str]:
        """Return the other targets, which are used as they are."""
        return [name for name in self.models if name not in (*self.built, *self.of_gguf)]

    def model_of(self, run: str) -> str:
        """Return the name of a run's target."""
        return next(config.recipe.model.name for key, config in self.configs.items() if key[0] == run)

    def evaluation_data(self, run: str) -> list[str]:
        """Return the datasets whose held-out records are a run's prompts."""
        return sorted({task.data for task in self.evaluation_of[run].tasks.values() if isinstance(task, HeldOut)})

    def stages_of(self, run: str, variant: str | None) -> list[Stage]:
        """Return all stages of a run, or of one variant of it, in order."""
        variants = self.variants[run] if variant is None else [variant]
        return [(run, each, stage) for each in variants for stage in self.stages[run]]

    @property
    def beginnings(self) -> dict[str, str]:
        """Return name here -> source, for the drafts made elsewhere that runs begin with."""
        found = [self.init(run, variant) for run in self.files for variant in self.variants[run]]
        return {readable_name(source): source for source in found if source is not None}

    def init(self, run: str, variant: str) -> str | None:
        """Return the source of the draft that a run's first stage begins with; None: a fresh draft."""
        source = self.first_recipe(run, variant).init
        return None if source is None else str(source)

    def begun_with(self, run: str, variant: str) -> list[str]:
        """Return that draft's name among a run's drafters, before its first stage; [] if the draft is fresh."""
        return [] if self.init(run, variant) is None else [IMPORTED]

    # Draft vocabularies.

    def first_recipe(self, run: str, variant: str) -> Any:
        """Return the recipe of the first stage; all stages have the same section `method`."""
        return self.configs[run, variant, self.stages[run][0]].recipe

    def lender(self, run: str, variant: str) -> tuple[str, str] | None:
        """Return run and variant that lend a draft vocabulary, the same variant if that run has it; None: its own is used."""
        other = methods.vocabulary_lender(self.first_recipe(run, variant))
        if other is None:
            return None
        variants = self.variants[name := name_of(other)]
        return name, variant if variant in variants else variants[0]

    # Which datasets are used for what.

    def replayed_data(self, run: str, variant: str, stage: str) -> dict[str, str]:
        """Return name in recipe.data.replay -> dataset that a stage replays, sorted by these names."""
        names = [(name, *name.split(OF_STAGE)) for name in sorted(self.configs[run, variant, stage].recipe.data.replay)]
        return {name: (of or [self.configs[run, variant, earlier].recipe.data.name])[0] for name, earlier, *of in names}

    def mixture(self, model: str) -> list[Any]:
        """Return the phases of a target's training; [] for a target that is not trained here."""
        return self.models[model].build.mixture if model in self.built else []

    def datasets_in_use(self) -> dict[str, str]:
        """Return every dataset of the chosen runs, with the key that names it."""
        names: dict[str, str] = {}
        for (run, _, stage), config in self.configs.items():
            mix = mix_of(config.recipe.data.name)
            key = f"run '{run}', stage '{stage}': recipe.data.name"
            names |= {name: f"{key}.{name}" if len(mix) > 1 else key for name in mix}
        for model in self.built:
            for phase in self.mixture(model):
                names[phase["dataset"]] = f"config/model/{model}.yaml: build.mixture: dataset"
        for evaluation in self.evaluation_of.values():
            for name, task in evaluation.tasks.items():
                if isinstance(task, HeldOut):
                    names[task.data] = f"{evaluation.file_of('tasks')}: evaluation.tasks.{name}.data"
        return names

    def datasets_trained_on(self) -> set[str]:
        """Return every dataset that a stage or a built target trains on."""
        phases = [phase["dataset"] for model in self.built for phase in self.mixture(model)]
        return {name for config in self.configs.values() for name in mix_of(config.recipe.data.name)} | set(phases)

    def trained_on_by(self, run: str) -> set[str]:
        """Return the datasets that a run's stages train on."""
        return {name for stage in self.stages_of(run, None) for name in mix_of(self.configs[stage].recipe.data.name)}
