"""The plan of the packed rows that stages train on: their own, and those of earlier stages that they replay."""

from typing import Any

from longspec.workflow import paths
from longspec.workflow.finals import FinalsPlan


class RowsPlan(FinalsPlan):
    """The choices, with an answer to each question about the rows of a stage."""

    def rows(self, run: str, variant: str, stage: str) -> str:
        """The manifest of the rows that a stage trains on."""
        recipe = self.configs[run, variant, stage].recipe
        return _packed(recipe, recipe.data.name)

    def replayed_rows(self, run: str, variant: str, stage: str) -> list[str]:
        """The manifests of the rows that a stage replays, packed like its own, in the order of their stages' names."""
        recipe = self.configs[run, variant, stage].recipe
        return [_packed(recipe, dataset) for dataset in self.replayed_data(run, variant, stage).values()]

    def replay_options(self, run: str, variant: str, stage: str, replayed: list[str]) -> list[str]:
        """The options that name them, each with the stage that it is of."""
        names = self.replayed_data(run, variant, stage)
        named = [f"{name}={path}" for name, path in zip(names, replayed, strict=True)]
        return ["--replay", *named] if named else []

    def all_rows(self, run: str, variant: str | None = None) -> list[str]:
        """The manifests of the own rows of all stages of a run, or of one variant of it."""
        return sorted({self.rows(*stage) for stage in self.stages_of(run, variant)})

    def trained_rows(self, run: str, variant: str | None = None) -> list[str]:
        """The manifests of all rows that a run trains on, or one variant of it: own and replayed ones."""
        replayed = [path for stage in self.stages_of(run, variant) for path in self.replayed_rows(*stage)]
        return sorted({*self.all_rows(run, variant), *replayed})


def _packed(recipe: Any, dataset: str) -> str:
    """The manifest of a dataset's rows as a recipe has them packed."""
    data = recipe.data
    return paths.PACKED.format(
        model=recipe.model.name,
        dataset=dataset,
        collation=data.collation,
        length=data.sequence_length,
        overlong=data.overlong,
    )
