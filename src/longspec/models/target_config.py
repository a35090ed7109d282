"""Read a target's config.json without running code from its folder, and hash its files. No torch: fetching has none."""

from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_json
from longspec.families import check_family

CONFIG = "config.json"


def target_hash(manifest: Path) -> str:
    """Return the hash of a target's files alone; its manifest also holds their place and how long training took."""
    return sha256_json(read_json(manifest)["files"])


def read_target_config(target: str | Path) -> Any:
    """Return transformers' configuration of a target's folder or hub name.

    Raises ValueError if there is none, or if its family is not supported. The family is checked before transformers looks for
    its class: for an unknown one, a folder may bring its own Python code.
    """
    from transformers import AutoConfig, PretrainedConfig  # it loads torch, where there is one: a target's facts need neither

    file = f"{target}/{CONFIG}"
    if Path(target).is_dir():
        content = read_json(Path(target) / CONFIG)
    else:
        try:
            content, _ = PretrainedConfig.get_config_dict(str(target))
        except OSError as error:
            raise ValueError(f"{file}: no configuration of a target there: {' '.join(str(error).split())}") from error
    check_family(content.get("model_type"), file)
    return AutoConfig.from_pretrained(target, trust_remote_code=False)
