"""A draft made elsewhere becomes a draft folder: a published one by its method's reader, or one of our own as it is."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from longspec import methods
from longspec.atomic_files import read_json_object
from longspec.config.names import IMPORTED
from longspec.distributed import log
from longspec.draft.folder import config_of, draft_config, empty_layer, write_draft
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_hash, tokenizer_hash_of
from longspec.methods.contract import Method
from longspec.methods.draft_files import CONFIG, METHOD, check_draft_config, draft_weights_file, write_draft_manifest
from longspec.models.target_config import read_target_config
from longspec.models.weight_files import read_folder, read_tensors


def read_target(target: Path) -> tuple[str, str, str | None]:
    """Folder, source and the tokenizer's hash of a target, which its folder or its manifest names."""
    if target.is_dir():
        return str(target), str(target), tokenizer_hash_of(target)
    manifest = read_json_object(target)
    return manifest["path"], manifest["source"], tokenizer_hash(manifest.get("files", {}))


def target_embeddings(folder: str) -> Tensor:
    """Read the target's embeddings alone."""
    return next(iter(read_folder(Path(folder), lambda name: name.endswith("embed_tokens.weight")).values()))


def read_draft(folder: Path, target_path: str, layers: tuple[int, ...] | None) -> tuple[Method, dict[str, Tensor], Any]:
    """Return method, state dict and settings of a draft's folder, published or ours."""
    config = read_target_config(target_path)
    content = {} if folder.is_file() else read_json_object(folder / CONFIG)
    if METHOD in content:
        if layers is not None:
            raise ValueError(f"--layers: {folder} is a draft folder of ours, which says its layers; leave it out")
        check_draft_config(folder, config)
        method = methods.method(content[METHOD])
        settings = method.stored_settings(folder)
        layer = method.layer(config, settings)
        method.load(layer, folder, config, settings)
        found = read_tensors(draft_weights_file(folder))
        return method, {name: found[name] for name in layer.state_dict()}, settings
    name = methods.method_of_file() if folder.is_file() else methods.published_method(content)
    assert name is not None  # longspec.draft.fetch has looked
    reader = methods.reader_of(name)
    state, settings = reader.read_published(folder, content, config, lambda: target_embeddings(target_path), layers)
    return methods.method(name), state, settings


def import_draft(
    folder: Path, target: Path, out: Path, origin: dict[str, Any], recipe: Any = None, layers: tuple[int, ...] | None = None
) -> None:
    """Write a draft folder from a draft made elsewhere, whole or not at all, and the file of the tokens that it proposes.

    origin: its source, commit and files, for config.json; recipe: of the stage that begins with it, which must be of such a
    draft. Raises ValueError that names what cannot be represented, and keys of the recipe that say otherwise.
    """
    target_path, target_source, tokenizer = read_target(target)
    method, state, settings = read_draft(folder, target_path, layers)
    config = read_target_config(target_path)
    method.check_state(empty_layer(method, config, settings), state, folder)
    content = config_of(method, settings, target_path, target_source, IMPORTED) | {IMPORTED: origin}
    # recipe.method of a run that trains such a draft, on one line.
    section = yaml.safe_dump(_of_method(content), default_flow_style=True, width=float("inf"), sort_keys=False).strip()
    if recipe is not None:
        check_recipe(content, draft_config(target_path, recipe), section, folder)
    proposed = None
    if tokenizer is not None:  # else nobody can tell whose tokens they are
        ids = getattr(settings, "ids", None) or range(config.vocab_size)
        proposed = DraftVocabulary(tuple(ids), config.vocab_size, tokenizer, {})  # which covers rows that are not known here
    write_draft(out, method.published(state, settings), content, proposed)
    write_draft_manifest(out)
    log(f"{out}: {len(state)} tensors, {content['num_parameters']} parameters")
    log(f"a run that begins with it has recipe: {{method: {section}}}")


def check_recipe(content: dict[str, Any], own: dict[str, Any], section: str, folder: Path) -> None:
    """Raise ValueError, with the keys and what to write, where a recipe's draft is another one; own: its config.json."""
    name = content[METHOD]
    if own[METHOD] != name:
        raise ValueError(
            f"recipe.method.name: is {own[METHOD]}, {folder} is a draft of {name}; in the run's file: method: {name}"
        )
    theirs, ours, defaults = _of_method(content), _of_method(own), vars(methods.settings_of(name).Method())
    wrong = [
        f"recipe.method.{key}: is {ours.get(key, defaults[key])}, the draft has {theirs.get(key, defaults[key])}"
        for key in dict.fromkeys([*theirs, *ours])
        if ours.get(key, defaults[key]) != theirs.get(key, defaults[key])
    ]
    if wrong:
        raise ValueError(
            f"{folder}: is not the draft that this run trains: {'; '.join(wrong)}; write in the run's file of config/run/: "
            f"recipe: {{method: {section}}}"
        )


def _of_method(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a config.json that are keys of recipe.method, less those at their defaults there."""
    known = {each.name: each.default for each in fields(methods.settings_of(content[METHOD]).Method) if each.name != "name"}
    settings = content["settings"]
    return {
        name: list(settings[name]) if isinstance(settings[name], tuple) else settings[name]
        for name, default in known.items()
        if name in settings and settings[name] != default
    }
