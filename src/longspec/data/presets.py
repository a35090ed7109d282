"""Published sets by name: a preset holds what an entry of workflow.yaml would.

config/data.yaml has those of `data`, config/evaluation.yaml those of `evaluation.tasks`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.config import CONFIG_DIR, yaml_files
from longspec.config.faults import did_you_mean


@dataclass(frozen=True)
class Kind:
    """One kind of preset: the section of workflow.yaml it is for, its file, and the key that each must have."""

    section: str
    file: Path
    needs: str

    def read(self) -> dict[str, Any]:
        """Return the presets by name. Raises ValueError for a file that holds something else."""
        content = yaml_files.read(self.file)
        if not isinstance(content, dict):
            raise ValueError(f"{self.file}: must be a mapping of presets by name")
        return content


DATA = Kind("data", CONFIG_DIR / "data.yaml", "source")
TASK = Kind("evaluation.tasks", CONFIG_DIR / "evaluation.yaml", "template")
OF_SOURCE = ("revision", "member")


def expand_all(entries: Any, kind: Kind) -> Any:
    """Entries by name, each with its preset laid out; what is no mapping is left to the schema."""
    if not isinstance(entries, dict):
        return entries
    return {name: expand(name, entry, kind) if isinstance(entry, dict) else entry for name, entry in entries.items()}


def expand(name: str, settings: dict[str, Any], kind: Kind = DATA) -> dict[str, Any]:
    """The settings of entry `name` with those of its preset beneath them; without a preset they come back as they are.

    A preset's `revision` and `member` are of its source alone: they go when the settings name another source, such as a copy on
    this machine. Raises ValueError for an unknown or malformed preset.
    """
    key = f"{kind.section}.{name}"
    if "preset" not in settings:
        return settings
    own = {key: value for key, value in settings.items() if key != "preset"}
    preset = settings["preset"]
    known = kind.read()
    if preset not in known:
        told = did_you_mean(str(preset), known)
        raise ValueError(f"{key}.preset: config/{kind.file.name} has no preset {preset!r}; {told}")
    beneath = known[preset]
    if not isinstance(beneath, dict) or kind.needs not in beneath or "preset" in beneath:
        raise ValueError(f"{kind.file}: {preset}: must be a mapping with the key {kind.needs}, and name no other preset")
    if "source" in own:
        beneath = {key: value for key, value in beneath.items() if key not in OF_SOURCE}
    return beneath | own
