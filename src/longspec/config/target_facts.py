"""Read a target's family, layers, tokens and positions, which a plan needs before the target is fetched.

A folder's config.json says them. For a target of the hub or a GGUF file, `python -m longspec.target facts` writes them to
NAME.target.json beside the run, so that later plans need no network.
"""

from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from longspec.atomic_files import read_json
from longspec.config.names import HUB_PREFIX, is_gguf

BESIDE = ".target.json"


@dataclass(frozen=True)
class TargetFacts:
    """Hold a target's facts. family: transformers' model type; layers, tokens, positions: None if config.json lacks them."""

    source: str
    family: str
    layers: int | None
    tokens: int | None
    positions: int | None


class NotKnownError(ValueError):
    """Say that nothing has been read of a target yet."""


def sizes_in(config: dict[str, Any]) -> list[int | None]:
    """Return the numbers of layers, tokens and positions in a config.json; None for one that it lacks."""
    told = (config.get(key) for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings"))
    return [value if type(value) is int else None for value in told]


def of_config(source: str, config: dict[str, Any]) -> TargetFacts:
    """Return the facts in a config.json. Raises ValueError if it has no family."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"{source}: its config.json has no model_type; give a folder or repository that transformers loads")
    return TargetFacts(source, family, *sizes_in(config))


def kept_beside(run: Path) -> Path:
    """Return the file that keeps the facts of a run's target. run: the run's file."""
    return run.with_name(run.stem + BESIDE)


def facts_of(source: str, run: Path) -> TargetFacts:
    """Return the facts of a target. run: the run's file.

    Raises ValueError for a folder without config.json, and NotKnownError, with the command to type, if nobody has read them.
    """
    if not source.startswith(HUB_PREFIX) and not is_gguf(source):
        config = Path(source).expanduser() / "config.json"
        if not config.is_file():
            what = "has no config.json" if config.parent.is_dir() else "no such folder"
            raise ValueError(f"target: {source}: {what} (seen from {Path.cwd()}); give a folder that transformers loads")
        return of_config(source, read_json(config))
    kept = kept_beside(run)
    content = read_json(kept) if kept.is_file() else {}
    if content.get("source") != source:
        command = ["python", "-m", "longspec.target", "facts", "--source", source, "--out", str(kept)]
        raise NotKnownError(f"target: {source}: nothing is known of it yet; type {join(command)}")
    try:
        return TargetFacts(**content)
    except TypeError:
        raise ValueError(f"{kept}: has other keys than {', '.join(TargetFacts.__annotations__)}; remove the file") from None
