"""Runs that begin with a draft made elsewhere (recipe.init): where its files lie, and that it is there."""

from pathlib import Path

from longspec import methods
from longspec.atomic_files import read_json_object
from longspec.config.names import HUB_PREFIX
from longspec.methods.draft_files import METHOD
from longspec.workflow.choices import Choices

WEIGHTS = (".pth", ".bin", ".safetensors")  # of a draft's weights alone


def local_files(source: str) -> list[str]:
    """Return the files of a draft on this machine that decide what it is; none for one of the hub."""
    folder = Path(source).expanduser()
    if source.startswith(HUB_PREFIX):
        return []
    if folder.is_file():
        return [str(folder)]
    patterns = ("config.json", "*.index.json", "*.safetensors", "pytorch_model*.bin")
    return sorted(str(path) for pattern in patterns for path in folder.glob(pattern))


def check_beginnings(choices: Choices) -> None:
    """Raise ValueError, with the key, for a draft to begin with that is not there."""
    for run in choices.known_runs:
        for variant in choices.variants[run]:
            recipe = choices.first_recipe(run, variant)
            key, source = f"run '{run}', variant '{variant}': recipe.init", recipe.init
            if source is not None and methods.vocabulary_lender(recipe) is not None:
                raise ValueError(
                    f"{key}: {source} brings its own tokens, recipe.method.vocabulary_from takes another run's; set that "
                    "to null"
                )
            if source is not None and not source.startswith(HUB_PREFIX):
                _check_local(f"{key}: {source}", Path(source).expanduser(), recipe.method.name)


def _check_local(key: str, folder: Path, method: str) -> None:
    """Check a folder of this machine: its files, and whose draft it is; the import reads the rest."""
    if folder.is_file():
        if folder.suffix not in WEIGHTS or method != methods.method_of_file():
            raise ValueError(
                f"{key}: is a file: give one of {', '.join(WEIGHTS)} of a {methods.method_of_file()} draft "
                f"(recipe.method.name is {method}), or a draft's folder with its config.json"
            )
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{key}: {'has no config.json' if folder.is_dir() else 'no such folder'} (seen from {Path.cwd()}); give "
            f"{HUB_PREFIX}<owner>/<repository>[@revision] or the folder of a draft"
        )
    config = read_json_object(folder / "config.json")
    found = config.get(METHOD) or methods.published_method(config)
    if found != method:
        told = f"is a draft of {found}" if found else f"architectures: {config.get('architectures')!r}: no draft that is known"
        raise ValueError(f"{key}: {told}, recipe.method.name is {method}; give a draft of this method, or change it")
    if len(local_files(str(folder))) < 2:
        raise ValueError(f"{key}: has no weights (*.safetensors or pytorch_model*.bin) beside config.json; copy them")
