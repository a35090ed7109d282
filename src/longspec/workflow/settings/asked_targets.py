"""Targets that a call of Snakemake asks for by a path, though no chosen run trains a draft for them."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from longspec.config import CONFIG_DIR, compose

# Of a path a user names, and of the wildcards by which Snakemake names a job to the process that runs it.
PLACES = r"(?:^models|^data/(?:answers|tokens|packed))/{name}/|[:,]model={name}(?:,|$)"


def asked_targets(arguments: Sequence[str], known: Collection[str], config_dir: Path = CONFIG_DIR) -> dict[str, Any]:
    """By the target's name a configuration in which it stands, for each file of config/model/ that the arguments name.

    known: the targets of the chosen runs, which are left out. Raises ValueError for a file that does not compose, and for one
    that has another name than its target.
    """
    found = {}
    for path in sorted((config_dir / "model").glob("*.yaml")):
        place = re.compile(PLACES.format(name=re.escape(path.stem)))
        if path.stem in known or not any(place.search(each) for each in arguments):
            continue
        config = compose("train", [f"model={path.stem}"], config_dir)
        if config.recipe.model.name != path.stem:
            raise ValueError(f"{path}: recipe.model.name: {config.recipe.model.name!r}; name the file as its target")
        found[path.stem] = config
    return found
