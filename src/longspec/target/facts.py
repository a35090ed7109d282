"""The `facts` verb: what a plan must know of a target, read once and kept beside the run (longspec.config.target_facts)."""

import tempfile
from pathlib import Path

from longspec.atomic_files import read_json_object
from longspec.config import target_facts
from longspec.config.names import HUB_PREFIX, hub_source, is_gguf
from longspec.config.target_facts import TargetFacts
from longspec.families import OF_GGUF, check_family, check_not_quantized
from longspec.models import model_folder

OTHERWISE = "say the family in the run's file: recipe: {model: {family: llama}}, or give the folder of the model"


def make(source: str, out: Path) -> None:
    """Read the facts of a target and write them. Raises ValueError for one that cannot be read, or has no draft here."""
    target_facts.write(out, of_gguf(source) if is_gguf(source) else of_folder(source))


def of_folder(source: str) -> TargetFacts:
    """By the config.json of a repository of the hub or of a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(source).expanduser()
        if source.startswith(HUB_PREFIX):
            folder = Path(scratch)
            model_folder.download(hub_source(source)[0], folder, ["config.json"], None, OTHERWISE)
        config = read_json_object(folder / "config.json")
    check_family(config.get("model_type"), f"{source}: config.json")
    check_not_quantized(config, f"{source}: config.json")
    return target_facts.of_config(source, config)


def of_gguf(source: str) -> TargetFacts:
    """By the keys of a GGUF file of this machine."""
    from longspec.target.gguf_file import read_metadata

    metadata = read_metadata(Path(source).expanduser())
    architecture = metadata["general.architecture"]
    tokens = metadata["tokenizer.ggml.tokens"]
    layers, positions = (metadata[f"{architecture}.{key}"] for key in ("block_count", "context_length"))
    return TargetFacts(source, OF_GGUF[architecture], layers, tokens if isinstance(tokens, int) else len(tokens), positions)
