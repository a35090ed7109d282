"""The model card of a draft: README.md of its repository, from what the final folder and the report hold. No torch."""

from pathlib import Path
from typing import Any

import jinja2
import yaml

from longspec import methods
from longspec.atomic_files import read_json

TEMPLATE = "card.md.j2"
HUB = "hf:"  # how a recipe names a target of the hub


def model_card(folder: Path, repository: str, revision: str, report: Path | None, variant: str | None) -> str:
    """The card's text. Raises ValueError for a report that does not hold this draft."""
    config, provenance = read_json(folder / "config.json"), read_json(folder / "provenance.json")
    training = yaml.safe_load((folder / "training_config.yaml").read_text(encoding="utf-8"))
    stages = [
        {"name": name, "recipe": training[name]["recipe"], "training": provenance["stages"][name]}
        for name in provenance["order"]
        if name in training  # those after the published one have not trained it
    ]
    model = stages[-1]["recipe"]["model"]
    module, cls, _ = (config["model_target"] or "..").rsplit(".", 2)
    part = Path(methods.__file__).parent / config["draft"] / "card.md.j2"
    loader = jinja2.ChoiceLoader(
        [jinja2.FileSystemLoader(Path(__file__).parent), jinja2.DictLoader({"method.md.j2": part.read_text(encoding="utf-8")})]
    )
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    acceptance = None if report is None else acceptance_table(report, variant, config["stage"])
    return environment.get_template(TEMPLATE).render(
        base_model=model["source"].removeprefix(HUB) if model["source"].startswith(HUB) else None,
        target_name=model["name"],
        config=config,
        provenance=provenance,
        stages=stages,
        module=module,
        cls=cls,
        repository=repository,
        revision=revision,
        acceptance=acceptance,
        intervals=acceptance is not None and "[" in str(acceptance["rows"]),
    )


def acceptance_table(report: Path, variant: str | None, stage: str) -> dict[str, Any]:
    """This draft's figures of report.json beside those of the drafters that are no stage of a training."""
    content = read_json(report)
    variants = content.get("variants", {})
    if variant is None and len(variants) == 1:
        variant = next(iter(variants))
    if variant not in variants:
        told = f"has no variant {variant!r}" if variant else "has several variants"
        raise ValueError(f"{report}: {told}; name one by --variant: {', '.join(variants)}")
    by_drafter, overall = variants[variant], content["overall"][variant]
    if stage not in by_drafter:
        raise ValueError(f"{report}: variant {variant}: has no figures of stage {stage}; make the report of this draft")
    tasks = sorted(by_drafter[stage])
    # A stage is measured against the one before it; the baselines have no stage before or after them.
    baselines = sorted(entry["before"] for entry in content["against_baselines"][variant])
    rows = []
    for name in [stage, *baselines]:
        cells = [_cell(figure) for figure in (*(by_drafter[name][task] for task in tasks), overall[name])]
        rows.append({"name": "this draft" if name == stage else name, "cells": cells})
    return {"tasks": tasks, "rows": rows, "prompts": overall[stage]["prompts"]}


def _cell(figure: dict[str, Any]) -> str:
    if figure["low"] is None:
        return f"{figure['mean']:.2f}"
    return f"{figure['mean']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"
