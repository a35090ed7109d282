"""Published sets by name: a preset holds what an entry of workflow.yaml would hold."""

from typing import Any

from longspec.config import CONFIG_DIR, yaml_files
from longspec.config.faults import did_you_mean

# The sections of workflow.yaml that know presets, and the files that hold them.
DATA, TASK = "data", "evaluation.tasks"
FILES = {DATA: CONFIG_DIR / "data.yaml", TASK: CONFIG_DIR / "evaluation.yaml"}
OF_SOURCE = ("revision", "member")


def expand_all(entries: Any, section: str) -> Any:
    """Return entries by name, presets expanded, without tasks that are null. What is no mapping is left to the schema."""
    if not isinstance(entries, dict):
        return entries
    told = {name: entry for name, entry in entries.items() if entry is not None or section == DATA}
    return {name: expand(name, entry, section) if isinstance(entry, dict) else entry for name, entry in told.items()}


def expand(name: str, settings: dict[str, Any], section: str = DATA) -> dict[str, Any]:
    """Return the settings of entry `name` laid over those of its preset; without a preset return them as they are.

    A preset's `revision` and `member` belong to its source alone: they go if the settings name another source, such as a copy
    on this machine. Raises ValueError for an unknown preset.
    """
    if "preset" not in settings:
        return settings
    own = {key: value for key, value in settings.items() if key != "preset"}
    preset, file = settings["preset"], FILES[section]
    known = yaml_files.read(file) or {}
    if preset not in known:
        told = did_you_mean(str(preset), known)
        raise ValueError(f"{section}.{name}.preset: config/{file.name} has no preset {preset!r}; {told}")
    beneath = known[preset]
    if "source" in own:
        beneath = {key: value for key, value in beneath.items() if key not in OF_SOURCE}
    return beneath | own
