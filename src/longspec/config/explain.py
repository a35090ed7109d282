"""Errors of Hydra and OmegaConf as one line that begins with the key."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

NO_LIST = "is not a ListConfig"
UNKNOWN = "unknown key"
# Keys of the published trainer's experiment files: where the same is said here.
PUBLISHED = {
    "fp16": "recipe.precision says bf16, fp32 or auto; nothing is trained in fp16",
    "model": "the target is recipe.model (or model=<a file of config/model/>)",
    "model_name_or_path": "the target is recipe.model.source, such as hf:<owner>/<repository> or a folder, and "
    "files.target names its target_manifest.json",
    "draft_model_name_or_path": "the draft to begin with is files.init_weights, a draft folder or a file of weights",
    "ignore_mismatched_sizes": "weights that do not fit are always refused, by the names of their tensors; remove the key",
}


@contextmanager
def faults_in(place: object) -> Iterator[None]:
    """Name what is at fault, a file or a key, before the words of a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The names that exist, the likeliest typo first."""
    close = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}."


def one_line(error: BaseException) -> str:
    """The cause of an error with its key; Hydra wraps it and says in which file it was at work."""
    file = re.match(r"In '(.+?)':", str(error))
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        cause = cause.__context__
    if cause is None:
        return " ".join(str(error).partition("Config search path")[0].split())
    assert isinstance(cause, OmegaConfBaseException)
    return f"{cause.full_key}: {_fault(cause)}" + (f" (in {file[1]}.yaml)" if file else "")


def _fault(error: OmegaConfBaseException) -> str:
    """The message for an error, without the key it is about."""
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and is_dataclass(error.object_type):
        return unknown_key(str(error.key), error.object_type)
    told = str(error.msg or error).partition("\n")[0]
    return "must be a list, such as [a, b]" if NO_LIST in told else told


def unknown_key(name: str, schema: type) -> str:
    """The message for an unknown key of a section, with the known ones; schema: the section's dataclass."""
    if name in PUBLISHED:
        return f"{UNKNOWN}, of the published trainer: {PUBLISHED[name]}"
    return f"{UNKNOWN}; {did_you_mean(name, [field.name for field in fields(schema)])}"
