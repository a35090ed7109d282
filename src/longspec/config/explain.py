"""Errors of Hydra and OmegaConf as one line that begins with the key."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

NO_LIST = "is not a ListConfig"
UNKNOWN = "unknown key"


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
        return f"{UNKNOWN}; {did_you_mean(str(error.key), [field.name for field in fields(error.object_type)])}"
    told = str(error.msg or error).partition("\n")[0]
    return "must be a list, such as [a, b]" if NO_LIST in told else told
