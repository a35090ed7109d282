"""Draft folders: made of checkpoints or of drafts from elsewhere, assembled, laid out otherwise, uploaded."""

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from longspec import atomic_files, shown
from longspec.atomic_files import check_files, checked_folder, describe_files, files_below, new_folder, read_json, write_json
from longspec.distributed import log


def extract(options: argparse.Namespace) -> None:
    """Make a draft folder of a checkpoint, on one CPU, without loading the target."""
    from longspec.config import plain
    from longspec.draft.folder import draft_config, empty_layer, write_draft
    from longspec.draft.trained import Checkpoint, provenance
    from longspec.draft_vocabulary import tokenizer_files, tokenizer_hash
    from longspec.methods import method_of, vocabulary_for
    from longspec.methods.draft_files import write_draft_manifest
    from longspec.models.target_config import read_target_config
    from longspec.train.checkpoint.save_load import draft_state_dict

    checkpoint = Checkpoint(options.checkpoint)
    recipe, out = checkpoint.recipe, options.out or checkpoint.stage / "draft"
    vocabulary = vocabulary_for(recipe, options.vocabulary)
    checkpoint.check_vocabulary(options.vocabulary, vocabulary)
    of_target = options.target or Path("models", recipe.model.name, "target_manifest.json")
    target, tokenizer = checked_folder(of_target), tokenizer_hash(read_json(of_target).get("files", {}))
    of_model = read_target_config(target)
    if vocabulary is not None:
        vocabulary.check_tokens(options.vocabulary, of_model.vocab_size, target, tokenizer)
    state = draft_state_dict(checkpoint.slot)
    method, settings = method_of(recipe, vocabulary)
    method.check_state(empty_layer(method, of_model, settings), state, options.checkpoint)
    config = draft_config(target, recipe, vocabulary)
    training = {recipe.stage: {"recipe": plain(recipe)} | checkpoint.runtime}
    write_draft(out, method.published(state, settings), config, tokenizer=Path(target), training=training)
    write_draft_manifest(out)
    if options.data:
        content = provenance({recipe.stage: checkpoint.stage}, recipe.stage, of_target, of_target, options.data)
        write_json(out / "provenance.json", content | {"files": describe_files(out, files_below(out))})
    without = "" if tokenizer_files(Path(target)) else f"; no tokenizer, since {target} has none"
    log(f"{out}: {len(state)} tensors, {config['num_parameters']} parameters{without}")


def fetch_(options: argparse.Namespace) -> None:
    """Fetch a draft made elsewhere from the hub, or find it in a folder, and write its manifest."""
    from longspec.draft.fetch import fetch

    options.out.unlink(missing_ok=True)  # an old manifest must not describe files that a download changes
    folder, manifest = fetch(options.source, options.out.parent / "files")
    write_json(options.out, {"path": atomic_files.path_text(folder), **manifest})


def import_(options: argparse.Namespace) -> None:
    """Make a draft folder of a draft made elsewhere. Of the target only its configuration and its embeddings are read."""
    from longspec.config import Recipe, load
    from longspec.draft.fetch import fetch
    from longspec.draft.importing import import_draft

    recipe = None if options.recipe is None else load(options.recipe, Recipe)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.out.parent, prefix=".fetched-") as place:
        if options.source.endswith(".json"):
            origin = read_json(Path(options.source))
            folder = Path(origin.pop("path"))
            check_files(folder.parent if folder.is_file() else folder, origin["files"])
        else:
            folder, origin = fetch(options.source, Path(place))
        import_draft(folder, options.target, options.out, origin, recipe)


def final(options: argparse.Namespace) -> None:
    """Put the published stage's draft together with tokenizer, training configuration and provenance."""
    from longspec import methods
    from longspec.config.names import FINAL, IMPORTED
    from longspec.draft.layouts import write_layout
    from longspec.draft.trained import CHECKPOINT, Checkpoint, provenance, write_training_config
    from longspec.engines import VLLM
    from longspec.methods.draft_files import check_draft_files, method_of_draft

    tokenizer = Path(checked_folder(options.tokenizer))
    draft, trained_by = options.draft, options.stages
    if options.choice is not None:  # the stages up to the chosen one have trained it
        names = [folder.name for folder in options.stages]
        trained_by = options.stages[: names.index(read_json(options.choice)["stage"]) + 1]
        draft = trained_by[-1] / "draft"
    configurations = {}
    for folder in trained_by:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        configurations[folder.name] = {"recipe": recipe} | Checkpoint(folder / CHECKPOINT).runtime
    check_draft_files(draft)
    with new_folder(options.out) as beside:
        shutil.copytree(draft, beside, dirs_exist_ok=True)
        for name in read_json(options.tokenizer)["files"]:
            shutil.copy(tokenizer / name, beside / name)
        write_training_config(beside, configurations)
        folders = {folder.name: folder for folder in options.stages}
        content = provenance(folders, trained_by[-1].name, options.target, options.tokenizer, options.data)
        if options.choice is not None:
            content[FINAL] = read_json(options.choice)
        if options.imported is not None:
            content[IMPORTED] = read_json(options.imported)[IMPORTED]
        files = describe_files(beside, files_below(beside))
        write_json(beside / "provenance.json", content | {"files": files})
        served = methods.settings_of(method_of_draft(beside)).SERVED.get(VLLM)
        if served is not None and served.layout is not None:
            write_layout(beside, served.layout)
    log(f"{options.out}: {', '.join(files_below(options.out))}")


def export(options: argparse.Namespace) -> None:
    """Write a draft folder in another program's layout, and its target if asked. What vLLM loads as it is needs none."""
    from longspec.draft.layouts import write_layout
    from longspec.methods.draft_files import find_target, read_draft_config

    found = None if options.target is None else read_draft_config(options.folder)
    named = "" if found is None else found[1]["target_path"]
    target = None if found is None else find_target(options.folder, named) or Path(named)
    if target is not None:  # checked before anything is written
        from longspec.target.layouts import checked_layout, write_target  # torch, which no draft needs

        checked_layout(target, options.layout, options.target)
    write_layout(options.folder, options.layout, options.out, options.dtype, options.context)
    if target is not None:
        write_target(target, options.layout, options.target, options.dtype)


def push(options: argparse.Namespace) -> None:
    """Upload a final draft folder to the Hugging Face hub, with a model card."""
    from longspec.draft import hub_upload

    names = hub_upload.files_to_push(options.folder)
    text = hub_upload.model_card(options.folder, options.repo, options.revision, options.report, options.variant)
    log(hub_upload.push(options.folder, names, text, options.repo, options.revision, private=options.private))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m longspec.draft", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = shown.add_verb(verbs, "extract", str(extract.__doc__), run=extract)
    verb.add_argument("checkpoint", type=Path, help="a stage's checkpoint.json")
    verb.add_argument("--target", type=Path, help="default: models/{recipe.model.name}/target_manifest.json")
    verb.add_argument("--vocabulary", type=Path, help="its draft_vocabulary_{size}.json, where it has one")
    verb.add_argument("--data", type=Path, nargs="+", help="its rows' manifests, for provenance.json")
    verb.add_argument("--out", type=Path, help="the folder to make; default: draft, in the stage's folder")
    verb = shown.add_verb(verbs, "fetch", str(fetch_.__doc__), run=fetch_)
    verb.add_argument("--source", required=True, help="hf:owner/name[@revision] or a folder")
    verb.add_argument("--out", type=Path, required=True, help="the manifest to write")
    verb = shown.add_verb(verbs, "import", str(import_.__doc__), run=import_)
    verb.add_argument("source", help="a draft's folder, hf:owner/name[@revision], or a manifest that `fetch` wrote")
    verb.add_argument("--target", type=Path, required=True, help="the target's folder or its target_manifest.json")
    verb.add_argument("--recipe", type=Path, help="recipe.yaml of the stage that begins with it, which must be of such a draft")
    verb.add_argument("--out", type=Path, required=True, help="the folder to make")
    verb = shown.add_verb(verbs, "final", str(final.__doc__), run=final)
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument("--draft", type=Path, help="draft folder of the last stage, where that is published")
    which.add_argument("--choice", type=Path, help="final_stage.json, which names the stage that is published")
    verb.add_argument("--stages", type=Path, nargs="+", required=True, help="folders of all stages, in order")
    verb.add_argument("--tokenizer", type=Path, required=True, help="tokenizer_manifest.json")
    verb.add_argument("--data", type=Path, nargs="+", required=True, help="manifests of the packed rows")
    verb.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    verb.add_argument("--imported", type=Path, help="config.json of the imported draft that the first stage began with")
    verb.add_argument("--out", type=Path, required=True, help="the folder to make")
    verb = shown.add_verb(verbs, "export", str(export.__doc__), run=export)
    verb.add_argument("folder", type=Path, help="final_draft folder, or the draft of a stage")
    verb.add_argument("--layout", required=True, help="speculators, vllm, gguf or openvino, as the draft's method has them")
    where = "the folder to make, which must not be there; default, for layouts without weights of their own: {folder}/{layout}"
    verb.add_argument("--out", type=Path, help=where)
    verb.add_argument(
        "--dtype", help="of weights that are written anew; f32, f16, bf16, of gguf also q8_0; default: the layout's"
    )
    verb.add_argument("--context", type=int, help="tokens of the longest text; a window of as many or more is written as none")
    verb.add_argument("--target", type=Path, help="where to write the draft's target in this layout too")
    verb = shown.add_verb(verbs, "push", f"{push.__doc__} The token is read from HF_TOKEN.", run=push)
    verb.add_argument("folder", type=Path, help="final_draft folder")
    verb.add_argument("--repo", required=True, help="owner/name of the repository; made if it is not there")
    verb.add_argument("--revision", default="main", help="branch to commit to; made if it is not there")
    verb.add_argument("--private", action="store_true", help="for this owner's eyes alone")
    verb.add_argument("--report", type=Path, help="report.json, for the card's acceptance table")
    verb.add_argument("--variant", help="the draft's variant in the report; needed when it has several")
    options = parser.parse_args()
    with shown.ending_for_mistakes():
        options.run(options)


if __name__ == "__main__":
    main()
