"""Upload a final draft folder to the Hugging Face hub, with its model card. No torch: login nodes push too.

The token comes from HF_TOKEN alone, never from an earlier login on the machine; HF_ENDPOINT names another hub.
"""

import os
from pathlib import Path
from typing import Any

import jinja2
import yaml

from longspec import chain_length, methods
from longspec.atomic_files import check_files, files_below, read_json
from longspec.config.names import HUB_PREFIX
from longspec.config.schema import mix_told
from longspec.draft.layouts import write_layout
from longspec.engines import VLLM
from longspec.shown import brief

CARD = "README.md"
HUB = "https://huggingface.co"


def files_to_push(folder: Path) -> list[str]:
    """Return the files of a draft folder to upload, with vLLM's layout, which is made if it is missing.

    Raises ValueError if a file is missing or changed.
    """
    listed = read_json(folder / "provenance.json").get("files", {})
    check_files(folder, listed)
    served = methods.settings_of(read_json(folder / "config.json")["draft"]).SERVED.get(VLLM)
    if served is not None and served.layout is not None and not (folder / served.layout).is_dir():
        write_layout(folder, served.layout)
    chain_length.read_acceptance(folder)  # written after the folder was put together
    later = [name for name in ("provenance.json", chain_length.FILE) if (folder / name).is_file()]
    layout = folder / VLLM
    return sorted([*listed, *later, *(f"{layout.name}/{name}" for name in files_below(layout))])


def push(folder: Path, names: list[str], card: str, repository: str, revision: str, *, private: bool) -> str:
    """Create the repository if needed, commit the folder's files and the card in one commit, and return its address.

    Raises ValueError with a one-line reason if the hub refuses.
    """
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise ValueError("HF_TOKEN: not set; export a token with write access (hub: Settings, Access Tokens)")
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or HUB, token=token)
    files = [CommitOperationAdd(name, folder / name) for name in names]
    files.append(CommitOperationAdd(CARD, card.encode()))
    try:
        api.create_repo(repository, private=True if private else None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ValueError(f"{repository}: is there already and public; leave out --private, or make it private on the hub")
        if revision != "main":
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.create_commit(repository, files, commit_message=f"Draft {folder.name}", revision=revision)
    except (HTTPError, OSError) as error:
        told = f"{type(error).__name__}: {brief(error)}; give a token that may write there as HF_TOKEN"
        raise ValueError(f"{api.endpoint}/{repository}: {told}") from error
    return str(commit.commit_url)


def model_card(folder: Path, repository: str, revision: str, report: Path | None, variant: str | None) -> str:
    """Return the card's text. Raises ValueError if the report does not hold this draft."""
    config, provenance = read_json(folder / "config.json"), read_json(folder / "provenance.json")
    training = yaml.safe_load((folder / "training_config.yaml").read_text(encoding="utf-8"))
    stages = [
        {
            "name": name,
            "recipe": (recipe := training[name]["recipe"]),
            "data": mix_told(recipe["data"]["name"]),
            "training": provenance["stages"][name],
        }
        for name in provenance["order"]
        if name in training  # stages after the published one have not trained it
    ]
    model = stages[-1]["recipe"]["model"]
    module, cls, _ = (config["model_target"] or "..").rsplit(".", 2)
    loader = jinja2.FileSystemLoader([Path(__file__).parent, Path(methods.__file__).parent])
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    acceptance = None if report is None else acceptance_table(report, variant, config["stage"])
    return environment.get_template("card.md.j2").render(
        base_model=model["source"].removeprefix(HUB_PREFIX) if model["source"].startswith(HUB_PREFIX) else None,
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
    """Return this draft's figures from report.json, next to those of the baselines. Raises ValueError if it has none."""
    content = read_json(report)
    variants = content["variants"]
    if variant is None and len(variants) == 1:
        variant = next(iter(variants))
    if stage not in variants.get(variant, {}):
        raise ValueError(f"{report}: no figures of stage {stage} of --variant {variant}; it has {', '.join(variants)}")
    by_drafter, overall = variants[variant], content["overall"][variant]
    tasks = sorted(by_drafter[stage])
    # A stage is measured against the one before it; the baselines have no stage before or after them.
    baselines = sorted(entry["before"] for entry in content["against_baselines"][variant])
    rows = []
    for name in [stage, *baselines]:
        figures = [*(by_drafter[name][task] for task in tasks), overall[name]]
        ranges = ["" if figure["low"] is None else f" [{figure['low']:.2f}, {figure['high']:.2f}]" for figure in figures]
        cells = [f"{figure['mean']:.2f}{told}" for figure, told in zip(figures, ranges, strict=True)]
        rows.append({"name": "this draft" if name == stage else name, "cells": cells})
    main = content["measured"][variant][stage][0]  # the main setting, which a report shows throughout
    decoding = f"temperature {main['temperature']:g}" if main["temperature"] else "greedy decoding"
    decoding += f", {chain_length.shape_name(main['shape'])}"
    return {"tasks": tasks, "rows": rows, "prompts": overall[stage]["prompts"], "decoding": decoding}
