"""Reads the inputs of the report: stages, evaluations, provenance, the target's shape."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.atomic_files import read_json, sha256_file
from longspec.config import Recipe, load
from longspec.config.names import BASELINES, FINAL, IMPORTED, UNTRAINED, WITH_LOOKUP
from longspec.config.schema import mix_of, mix_told
from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from longspec.journal import finished
from longspec.measure import lines
from longspec.measure.lines import Evaluation
from longspec.measure.tasks import Settings

MACHINE = ("device", "ranks", "threads")  # keys of an evaluation's identity


@dataclass(frozen=True)
class Stage:
    """Hold one trained stage. recipe: the frozen section, typed by config.Recipe."""

    name: str
    recipe: Any
    metrics: list[dict[str, Any]]

    @property
    def data(self) -> str:
        """Return the names of its data, as text."""
        return mix_told(self.recipe.data.name)

    @property
    def datasets(self) -> list[str]:
        return list(mix_of(self.recipe.data.name))

    def total(self, name: str) -> Any:
        """Return the sum of a metric over all steps."""
        return sum(row[name] for row in self.metrics)


@dataclass(frozen=True)
class Variant:
    """Hold one variant of a run: its stages in training order, and the measurements of each drafter.

    evaluations: of the baselines, the stages in order, and the final draft with lookup if measured; final: the published
    stage; vocabulary: None if the draft proposes all of the target's tokens; machine: device, ranks and threads on which its
    final draft was measured.
    """

    name: str
    stages: list[Stage]
    evaluations: dict[str, Evaluation]
    provenance: dict[str, Any]
    final: str
    vocabulary: DraftVocabulary | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def stage_names(self) -> list[str]:
        return [stage.name for stage in self.stages]

    @property
    def baselines(self) -> list[str]:
        """Return the names of the drafters that no stage has trained."""
        return [name for name in (*BASELINES, IMPORTED) if name in self.evaluations]


def read_stage(folder: Path) -> Stage:
    """Read recipe and metrics of a stage's folder."""
    metrics = list(jsonl.read(folder / "metrics.jsonl"))
    for row in metrics:
        for name in ("loss", "llm_loss"):
            row[name] = math.nan if row[name] is None else float(row[name])
    return Stage(folder.name, load(folder / "recipe.yaml", Recipe), metrics)


def read_provenance(folder: Path) -> dict[str, Any]:
    """Read provenance.json of the final draft in a variant's folder."""
    return read_json(folder / "final_draft" / "provenance.json")


def records_that_chose(folders: Iterable[Path]) -> dict[str, set[int]]:
    """Return, by dataset, the records that chose the published stage of any of these variants. folders: theirs."""
    found: dict[str, set[int]] = {}
    for folder in folders:
        for data, numbers in read_provenance(folder).get(FINAL, {}).get("records", {}).items():
            found.setdefault(data, set()).update(numbers)
    return found


def read_variant(
    name: str, folder: Path, settings: Settings, vocabulary: Path | None, measured: str, records: Mapping[str, Collection[int]]
) -> Variant:
    """Read all of a variant's files. vocabulary: its draft's file, if it has one; measured: name of the measurements' folder.

    records: by dataset, those to leave out. Raises ValueError for measurements of other settings or prompts.
    """
    provenance = read_provenance(folder)
    stages = [read_stage(folder / stage) for stage in provenance["order"]]
    left_out = {task: records.get(data, ()) for task, data in settings.data.items()}
    begun_with = [] if stages[0].recipe.init is None else [IMPORTED]
    beside = [] if settings.with_lookup is None else [WITH_LOOKUP]
    drafters = {}
    for drafter in (*BASELINES, *begun_with, *provenance["order"], *beside):
        drafters[drafter] = lines.read(folder / measured / f"{drafter}.jsonl", settings, left_out)
        lines.check_pairs(drafters[UNTRAINED], drafters[drafter])
    held = None if vocabulary is None else read_draft_vocabulary(vocabulary, counted=True)
    published = provenance.get(FINAL, {"stage": stages[-1].name})["stage"]
    told = finished(folder / measured / f"{published}.jsonl")
    identity = next(jsonl.read(told), {}).get("identity", {}) if told.is_file() else {}
    machine = {name: identity[name] for name in MACHINE if name in identity}
    return Variant(name, stages, drafters, provenance, published, held, machine)


def read_target(model_dir: Path) -> dict[str, Any]:
    """Read what the page shows of a target: name, source, its manifest's hash, and config.json from the manifest's path."""
    path = model_dir / "target_manifest.json"
    manifest = read_json(path)
    config = read_json(Path(manifest["path"]) / "config.json")
    return {"name": model_dir.name, "config": config, "manifest_hash": sha256_file(path), "source": manifest["source"]}
