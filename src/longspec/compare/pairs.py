"""One variant as two runs trained it, or one of each, measured on the same prompts."""

from dataclasses import dataclass, replace
from pathlib import Path

from longspec.config.names import BASELINES
from longspec.evaluate.tasks import Settings
from longspec.report.evaluations import Evaluation, check_pairs
from longspec.report.inputs import Stage, Variant, read_variant, records_that_chose

FINAL = "final draft"


@dataclass(frozen=True)
class Pair:
    """Variants of the first and the second run, mostly of one name; in `runs` each is named after its run."""

    variants: tuple[str, str]
    runs: tuple[Variant, Variant]

    @property
    def variant(self) -> str:
        """The pair's name."""
        return "-and-".join(dict.fromkeys(self.variants))

    @property
    def mixed(self) -> str:
        """A sentence for a pair of two names; empty for one."""
        if len(set(self.variants)) == 1:
            return ""
        one, other = (f"{variant} of {run.name}" for variant, run in zip(self.variants, self.runs, strict=True))
        return f"{one} is compared with {other}: the runs share no variant of these names."

    @property
    def drafters(self) -> dict[str, tuple[Evaluation, Evaluation]]:
        """Evaluations to compare, by name: the final drafts, then the other drafters that both runs have, baselines last."""
        first, second = self.runs
        found = {self.finals: (first.evaluations[first.final], second.evaluations[second.final])}
        return found | {name: (first.evaluations[name], second.evaluations[name]) for name in (*self.stages, *BASELINES)}

    @property
    def finals(self) -> str:
        """The name under which the final drafts are compared: their stage's, or another where these differ."""
        first, second = self.runs
        return first.final if first.final == second.final else FINAL

    @property
    def stages(self) -> dict[str, tuple[Stage, Stage]]:
        """The stages that both runs have, by name."""
        first, second = ({stage.name: stage for stage in run.stages} for run in self.runs)
        return {name: (stage, second[name]) for name, stage in first.items() if name in second}


def read_pair(variants: tuple[str, str], runs: list[tuple[str, Path]], settings: Settings) -> Pair:
    """Both runs' files. Raises ValueError when these are not two runs, one is not there, or they met different prompts."""
    names = [name for name, _ in runs]
    if len(runs) != 2 or len(set(names)) != 2:
        raise ValueError(f"--run: {', '.join(names)}: give two different runs, --run a=results/a --run b=results/b")
    for name, folder in runs:
        if not folder.is_dir():
            raise ValueError(
                f"--run {name}: there is no folder {folder}; correct the name, or train the run: "
                f"snakemake final_draft --config 'runs=[{name}]'"
            )
    folders = [folder / variant for variant, (_, folder) in zip(variants, runs, strict=True)]
    records = records_that_chose(folders)
    first, second = (
        replace(read_variant(folder.name, folder, settings, records=records), name=name)
        for name, folder in zip(names, folders, strict=True)
    )
    pair = Pair(variants, (first, second))
    for one, other in pair.drafters.values():
        check_pairs(one, other)
    return pair
