"""Names of datasets on the Hugging Face hub, and which files of a repository a name stands for."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from longspec.config.names import HUB_PREFIX, is_repository
from longspec.shown import brief

FORMS = "hf:<owner>/<repository>[:config][:split] or hf:<owner>/<repository>/<file>, the file with * ? [...] if there are many"
CARD = "README.md"


class UnavailableError(ValueError):
    """The hub cannot be asked, or has not what it is asked for; the message says why in one line."""


@dataclass(frozen=True)
class Source:
    """A parsed hf: name: a repository, and its config and split (`parts`, either may be left out) or a file."""

    text: str
    repository: str
    parts: tuple[str, ...] = ()
    file: str = ""


def parse(text: str) -> Source:
    """Take an hf: name apart. Raises ValueError for one that has none of the two forms."""
    repository, *parts = text.removeprefix(HUB_PREFIX).split(":")
    owner, _, rest = repository.partition("/")
    name, slash, file = rest.partition("/")
    # A file's path is looked for in a folder of ours, too: it must stay in it.
    inside = not slash or (file.isprintable() and not {"", ".", ".."} & set(file.split("/")))
    if not is_repository(f"{owner}/{name}") or not inside or not all(parts) or len(parts) > 2 or (slash and parts):
        raise ValueError(f"'{text}' is no name of a dataset of the hub: {FORMS}")
    return Source(text, f"{owner}/{name}", tuple(parts), file)


def _split_files(source: Source, names: list[str], card: str) -> list[str]:
    """The files of a config's split. The library that loads such datasets decides it, on empty files of the same names."""
    from datasets import get_dataset_config_names, load_dataset_builder

    with TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "repository"
        root.mkdir()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        if card:
            (root / CARD).write_text(card, encoding="utf-8")
        try:
            configs = get_dataset_config_names(str(root))
            # One part alone is a config where there is one of that name, else a split of the default config.
            config = source.parts[0] if len(source.parts) == 2 or set(source.parts) & set(configs) else None
            builder = load_dataset_builder(str(root), config, cache_dir=f"{folder}/cache")
        except (ValueError, OSError) as error:
            raise UnavailableError(f"its files cannot be told apart ({brief(error)})".replace(str(root), ".")) from error
        splits = builder.config.data_files or {}
        asked = source.parts[1:] if config else source.parts
        split = asked[0] if asked else "train" if len(splits) != 1 else next(iter(splits))
        if split not in splits:
            raise UnavailableError(
                f"config '{builder.config.name}' has no split '{split}'; its splits: {', '.join(sorted(splits)) or 'none'};"
                f" the repository's configs: {', '.join(sorted(configs))}"
            )
        return [Path(path).relative_to(root).as_posix() for path in splits[split]]


def choose(source: Source, names: list[str], card: str) -> list[str]:
    """Return the paths of a repository that a name stands for. `card`: the text of its README.md, where configs are declared.

    Raises UnavailableError when there are none.
    """
    if not source.file:
        return sorted(_split_files(source, names, card))
    pattern = source.file.split("/")  # of which * does not cross a slash
    alike = [name for name in names if name.count("/") == len(pattern) - 1 and all(map(fnmatchcase, name.split("/"), pattern))]
    chosen = [source.file] if source.file in names else sorted(alike)
    if not chosen:
        raise UnavailableError(f"there is no file '{source.file}' in it")
    return chosen
