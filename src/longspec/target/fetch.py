"""Use a target made elsewhere, from a folder or a repository of the Hugging Face hub, or read only its facts."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspec import atomic_files
from longspec.atomic_files import describe_files, path_text, read_json, write_json
from longspec.config.names import HUB_PREFIX, hub_source, is_gguf
from longspec.config.target_facts import TargetFacts, of_config
from longspec.draft_vocabulary import tokenizer_files
from longspec.families import OF_GGUF, check_content, check_target
from longspec.models import model_folder
from longspec.models.model_folder import weight_files
from longspec.models.target_config import read_target_config

PATTERNS = ["*.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.model", "merges.txt", "*.jinja"]
FAMILY_INSTEAD = "say the family in the run's file: recipe: {model: {family: llama}}, or give the folder of the model"


def write_manifest(path: Path, folder: Path, source: str, names: list[str], **more: Any) -> None:
    """Write the manifest of a folder. names: the files that count, listed with their hashes; more: further fields."""
    files = describe_files(folder, names)
    atomic_files.write_manifest(path, folder, {"path": path_text(folder), "source": source, "files": files, **more})


def check_folder(folder: Path) -> tuple[list[str], list[str]]:
    """Return the weight files and the tokenizer's files of a target's folder. Raises ValueError if one is missing."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{config}: missing; model.source must name the folder of a transformers model")
    check_target(read_target_config(folder), config)
    weights, tokenizer = weight_files(folder), tokenizer_files(folder)
    if "tokenizer.json" not in tokenizer:
        raise ValueError(f"{folder / 'tokenizer.json'}: missing; save_pretrained the tokenizer there with transformers")
    return weights, tokenizer


def download(repository: str, folder: Path) -> str:
    """Download a hub repository into `folder`, resuming an earlier try; return the commit's hash.

    Raises ValueError with what to do without a network, and for an unsupported target before its weights are downloaded.
    """
    otherwise = (
        "place the folder (config.json, *.safetensors, tokenizer.json, tokenizer_config.json) where this machine can read it, "
        "and give its path as target of the run's file, or as source of the target's file in config/model/"
    )
    commit = model_folder.download(repository, folder, ["config.json"], None, otherwise)
    if (folder / "config.json").is_file():  # if it is missing, check_folder says so later
        check_target(read_target_config(folder), f"hf:{repository}/config.json")
    commit = model_folder.download(repository, folder, PATTERNS, commit, otherwise)
    if not any(folder.glob("*.safetensors")):
        return model_folder.download(repository, folder, ["pytorch_model*.bin"], commit, otherwise)
    return commit


def make(source: str, out_target: Path, out_tokenizer: Path) -> None:
    """Write both manifests of a target that is used as it is. source: hf:<repository> or a folder."""
    more = {}
    for out in (out_target, out_tokenizer):
        out.unlink(missing_ok=True)  # an old manifest must not describe files that the download changes
    if source.startswith(HUB_PREFIX):
        folder = out_target.parent / "target"
        more["commit"] = download(source.removeprefix(HUB_PREFIX), folder)
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ValueError(f"recipe.model.source: {source}: no such folder; give build, hf:<repository> or a folder")
    write_manifests(folder, source, out_target, out_tokenizer, **more)


def write_manifests(folder: Path, source: str, out_target: Path, out_tokenizer: Path, **more: Any) -> None:
    """Write the manifests of a target's folder and of its tokenizer; both get the fields `more`."""
    weights, tokenizer = check_folder(folder)
    hashed = [name for name in ("config.json", "generation_config.json", *tokenizer) if (folder / name).is_file()]
    write_manifest(out_tokenizer, folder, source, tokenizer, **more)
    write_manifest(out_target, folder, source, [*weights, *hashed], **more)


def write_facts(source: str, out: Path) -> None:
    """Read what a plan must know of a target that is not there yet, and write it to `out` (longspec.config.target_facts).

    Raises ValueError if the target cannot be read, or no method drafts for it.
    """
    write_json(out, asdict(_facts_of_gguf(source) if is_gguf(source) else _facts_of_folder(source)))


def _facts_of_folder(source: str) -> TargetFacts:
    """Return the facts in config.json of a hub repository or of a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(source).expanduser()
        if source.startswith(HUB_PREFIX):
            folder = Path(scratch)
            model_folder.download(hub_source(source)[0], folder, ["config.json"], None, FAMILY_INSTEAD)
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"{source}: has no config.json; give a repository that transformers loads, or download its .gguf file and "
                    "give the file's path"
                )
        config = read_json(folder / "config.json")
    check_content(config, f"{source}: config.json")
    return of_config(source, config)


def _facts_of_gguf(source: str) -> TargetFacts:
    """Return the facts in the keys of a GGUF file on this machine."""
    from longspec.target.dequantize import read_metadata  # needs torch, through transformers' reader of GGUF files

    metadata = read_metadata(Path(source).expanduser())
    architecture = metadata["general.architecture"]
    tokens = metadata["tokenizer.ggml.tokens"]
    layers, positions = (metadata[f"{architecture}.{key}"] for key in ("block_count", "context_length"))
    return TargetFacts(source, OF_GGUF[architecture], layers, tokens if isinstance(tokens, int) else len(tokens), positions)
