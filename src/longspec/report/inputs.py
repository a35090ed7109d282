"""Reads and checks the inputs of the report: stages, evaluations, manifests, provenance."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec import jsonl, methods
from longspec.atomic_files import read_json_object, sha256_file
from longspec.config import Recipe, load
from longspec.config.names import BASELINES, FINAL, IMPORTED, UNTRAINED, WITH_LOOKUP
from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from longspec.measure import lines
from longspec.measure.lines import Evaluation
from longspec.measure.tasks import Settings
from longspec.report.prediction import Shape, shape_of

TARGET_RULE = "train_target or fetch_target"
METRICS = ("step", "loss", "llm_loss", "lr", "tokens", "labels", "seconds", "skipped")


@dataclass(frozen=True)
class Stage:
    """One trained stage."""

    name: str
    recipe: Any  # the frozen section, typed by config.Recipe
    metrics: list[dict[str, Any]]

    @property
    def data(self) -> str:
        return str(self.recipe.data.name)

    def total(self, name: str) -> Any:
        """The sum of a number over all steps."""
        return sum(row[name] for row in self.metrics)


@dataclass(frozen=True)
class Variant:
    """One variant of the run: its stages in training order and what each drafter did."""

    name: str
    stages: list[Stage]
    evaluations: dict[str, Evaluation]  # the baselines, the stages in order, the final draft with lookup where it was measured
    provenance: dict[str, Any]
    final: str  # the stage that is published
    vocabulary: DraftVocabulary | None = None  # None: the draft proposes all of the target's tokens

    @property
    def stage_names(self) -> list[str]:
        return [stage.name for stage in self.stages]

    @property
    def baselines(self) -> tuple[str, ...]:
        """The drafters that no stage has trained."""
        return tuple(name for name in (*BASELINES, IMPORTED) if name in self.evaluations)

    @property
    def beginning(self) -> str:
        """The draft that the first stage is measured against: the one that it begins with."""
        return IMPORTED if IMPORTED in self.baselines else UNTRAINED


@dataclass(frozen=True)
class Manifest:
    """A manifest and where it stands."""

    path: Path
    content: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.content:
            raise ValueError(f"{self.path}: {name}: missing; make the file again")
        return self.content[name]


def require(path: Path, rule: str) -> Path:
    """The path, if the file is there. Raises ValueError that names the file and the rule that makes it."""
    if not path.is_file():
        raise ValueError(f"{path}: missing; the workflow makes it (rule {rule})")
    return path


def read_manifest(path: Path, rule: str) -> Manifest:
    """A JSON object with its path, for errors that name it. Raises ValueError when it is missing or no object."""
    return Manifest(path, read_json_object(require(path, rule)))


def read_stage(folder: Path) -> Stage:
    """Recipe and metrics of a stage's folder. Raises ValueError with file, line and field for what does not fit."""
    recipe = load(require(folder / "recipe.yaml", "stage_config"), Recipe)
    path = require(folder / "metrics.jsonl", "train")
    metrics, counts = [], methods.settings_of(recipe.method.name).COUNTS
    for number, row in enumerate(jsonl.read(path), 1):
        for name in (*METRICS, *counts):
            if name not in row:
                raise ValueError(f"{path}: line {number}: {name}: missing; train this stage again (rule train)")
        for name in ("loss", "llm_loss"):
            row[name] = math.nan if row[name] is None else float(row[name])
        metrics.append(row)
    if not metrics:
        raise ValueError(f"{path}: no step in it; train this stage again (rule train)")
    return Stage(folder.name, recipe, metrics)


def read_provenance(folder: Path) -> Manifest:
    """What the final draft in a variant's folder says of its making."""
    return read_manifest(folder / "final_draft" / "provenance.json", "assemble_final_draft")


def records_that_chose(folders: Iterable[Path]) -> dict[str, set[int]]:
    """By dataset the records that have chosen the published stage of one of these variants, given by their folders."""
    found: dict[str, set[int]] = {}
    for folder in folders:
        for data, numbers in read_provenance(folder).content.get(FINAL, {}).get("records", {}).items():
            found.setdefault(data, set()).update(numbers)
    return found


def read_variant(
    name: str,
    folder: Path,
    settings: Settings,
    vocabulary: Path | None = None,
    measured: str = "evaluation",
    records: Mapping[str, Collection[int]] | None = None,
) -> Variant:
    """All of a variant's files; `vocabulary`: that of its draft, where it has one; measured: the folder of its measurements.

    records: by dataset those that are not told. Raises ValueError for the first file that is missing or does not fit.
    """
    provenance = read_provenance(folder)
    stages = [read_stage(folder / stage) for stage in provenance["order"]]
    left_out = {task: (records or {}).get(data, ()) for task, data in settings.data.items()}
    baselines = BASELINES if stages[0].recipe.init is None else (*BASELINES, IMPORTED)
    beside = [] if settings.with_lookup is None else [WITH_LOOKUP]
    drafters = {}
    for drafter in (*baselines, *(stage.name for stage in stages), *beside):
        path = require(folder / measured / f"{drafter}.jsonl", "evaluate")
        drafters[drafter] = lines.read(path, drafter, settings, left_out)
        lines.check_pairs(drafters[UNTRAINED], drafters[drafter])
    held = None if vocabulary is None else read_draft_vocabulary(require(vocabulary, "draft_vocabulary"))
    final = provenance.content.get(FINAL, {"stage": stages[-1].name})["stage"]
    return Variant(name, stages, drafters, provenance.content, final, held)


@dataclass(frozen=True)
class Target:
    """The target LLM of the run."""

    shape: Shape
    manifest_hash: str
    source: str


def read_target(model_dir: Path) -> Target:
    """The target's shape from its own config.json, found through its manifest."""
    manifest = read_manifest(model_dir / "target_manifest.json", TARGET_RULE)
    config = read_manifest(Path(manifest["path"]) / "config.json", TARGET_RULE)
    shape = shape_of(model_dir.name, config.content, str(config.path))
    return Target(shape, sha256_file(manifest.path), str(manifest["source"]))
