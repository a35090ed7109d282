"""Make a draft folder from a draft made elsewhere: a published one with its method's reader, or one of our own as it is."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from longspec import methods
from longspec.atomic_files import describe_files, read_json
from longspec.config.names import IMPORTED
from longspec.distributed import log
from longspec.draft.folder import config_of, empty_layer, write_draft
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_files, tokenizer_hash
from longspec.methods import method_of
from longspec.methods.contract import Method
from longspec.methods.draft_files import CONFIG, METHOD, draft_weights_file, write_draft_manifest
from longspec.models.target_config import read_target_config
from longspec.models.weight_files import read_folder, read_tensors


def read_draft(folder: Path, target_path: str) -> tuple[Method, dict[str, Tensor], Any]:
    """Return method, state dict and settings of a draft, published or ours. folder: a draft's folder or one weight file."""
    config = read_target_config(target_path)
    content = {} if folder.is_file() else read_json(folder / CONFIG)
    if METHOD in content:
        method = methods.method(content[METHOD])
        settings = method.stored_settings(folder)
        layer = method.layer(config, settings)
        method.load(layer, folder, config, settings)
        found = read_tensors(draft_weights_file(folder))
        return method, {name: found[name] for name in layer.state_dict()}, settings
    name = methods.method_of_file() if folder.is_file() else methods.published_method(content)
    assert name is not None  # longspec.draft.fetch has checked

    def embeddings() -> Tensor:
        return next(iter(read_folder(Path(target_path), lambda name: name.endswith("embed_tokens.weight")).values()))

    reader = import_module(f"longspec.methods.{name}.published")
    return methods.method(name), *reader.read_published(folder, content, config, embeddings)


def import_draft(folder: Path, target: Path, out: Path, origin: dict[str, Any], recipe: Any = None) -> None:
    """Write a draft folder from a draft made elsewhere, with a file of the tokens that it proposes; whole or not at all.

    origin: source, commit and files, for config.json; recipe: of the stage that starts from the draft. Raises ValueError if
    the draft has something we cannot represent, or the recipe's method or shape differs from the draft's.
    """
    manifest: dict[str, Any] = {"path": str(target), "source": str(target)}
    manifest |= {"files": describe_files(target, tokenizer_files(target))} if target.is_dir() else read_json(target)
    target_path, tokenizer = manifest["path"], tokenizer_hash(manifest.get("files", {}))
    method, state, settings = read_draft(folder, target_path)
    config = read_target_config(target_path)
    method.check_state(empty_layer(method, config, settings), state, folder)
    content = config_of(method, settings, target_path, manifest["source"], IMPORTED) | {IMPORTED: origin}
    own, wanted = (None, None) if recipe is None else method_of(recipe)
    keys = _own_keys(content, wanted)
    if own is not None:
        if own.name != method.name:
            told = f"is {own.name}, {folder} is a draft of {method.name}; in the run's file: method: {method.name}"
            raise ValueError(f"recipe.method.name: {told}")
        method.check_same(folder, config, wanted, settings, f"write in the run's file: recipe: {keys}")
    proposed = None
    if tokenizer is not None:  # without its hash nobody can tell which tokenizer the tokens belong to
        ids = getattr(settings, "ids", None) or range(config.vocab_size)
        proposed = DraftVocabulary(tuple(ids), config.vocab_size, tokenizer, {})  # {}: its coverage of rows is not known here
    write_draft(out, method.published(state, settings), content, proposed)
    write_draft_manifest(out)
    log(f"{out}: {len(state)} tensors, {content['num_parameters']} parameters")
    log(f"a run that begins with it has recipe: {keys}")


def _own_keys(content: dict[str, Any], wanted: Any) -> str:
    """Return, on one line, the keys of a recipe that trains such a draft.

    Keys at their defaults are left out, unless `wanted`, a recipe's settings, differs. The vocabulary is always there, since
    its default depends on the target's size.
    """
    own, settings = methods.settings_of(content[METHOD]), content["settings"]
    section, names = own.SAME[0].removeprefix("recipe."), own.SAME[1]
    defaults = {each.name: each.default for each in fields({"method": own.Method, "draft": own.Draft}[section])}
    both = (settings, {} if wanted is None else vars(wanted))
    told = {
        name: list(settings[name]) if isinstance(settings[name], tuple) else settings[name]
        for name in names
        if name in settings and (name == "vocabulary" or any(each.get(name, defaults[name]) != defaults[name] for each in both))
    }
    return yaml.safe_dump({section: told}, default_flow_style=True, width=float("inf"), sort_keys=False).strip()
