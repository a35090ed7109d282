"""Published datasets by name: config/data/<preset>.yaml holds what an entry of `data` in workflow.yaml would."""

import difflib
from pathlib import Path
from typing import Any

import yaml

from longspec.config import CONFIG_DIR

FOLDER = CONFIG_DIR / "data"
# A secret has no place in a configuration: it would be copied to logs, manifests and reports.
SECRETS = ("token", "tokens", "hftoken", "authtoken", "useauthtoken", "accesstoken", "apitoken", "apikey", "password", "secret")


def refuse_secrets(settings: dict[str, Any], place: str = "") -> None:
    """Raises ValueError for a key that by its name holds a token; its value is not shown."""
    for key in settings:
        if str(key).lower().replace("_", "").replace("-", "").removeprefix("huggingface") in SECRETS:
            raise ValueError(f"{place}{key}: a token is never read from a configuration; set HF_TOKEN in the environment")


def expand(name: str, settings: dict[str, Any], folder: Path = FOLDER) -> dict[str, Any]:
    """The settings of dataset `name` with those of its preset beneath them; without a preset they come back as they are.

    A preset's `revision` is of its source alone: it goes when the settings name another source, such as a copy on this
    machine. Raises ValueError for an unknown or malformed preset, and for a key that holds a token.
    """
    refuse_secrets(settings, f"data.{name}.")
    if "preset" not in settings:
        return settings
    own = {key: value for key, value in settings.items() if key != "preset"}
    preset = settings["preset"]
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if preset not in known:
        close = difflib.get_close_matches(str(preset), known, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(
            f"data.{name}.preset: there is no config/data/{preset}.yaml; {hint}Known: {', '.join(known) or 'none'}."
        )
    path = folder / f"{preset}.yaml"
    beneath = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(beneath, dict) or "source" not in beneath or "preset" in beneath:
        raise ValueError(f"{path}: must be a mapping with the key source, and name no other preset")
    refuse_secrets(beneath, f"{path}: ")
    if "source" in own:
        beneath = {key: value for key, value in beneath.items() if key != "revision"}
    return beneath | own
