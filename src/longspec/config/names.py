"""Patterns of names. A name becomes a folder, a wildcard of the workflow, a key or an argument of a command: one pattern serves
runs, variants, stages, targets, datasets and tasks, another one repositories of the hub.
"""

import re

from longspec.atomic_files import sha256_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")
IS_NAME = "letters, digits, dots and hyphens, the first a letter or a digit, 100 at most"

UNTRAINED, LOOKUP = "untrained", "lookup"
BASELINES = (UNTRAINED, LOOKUP)  # drafters that are made without training
# The draft made elsewhere that a run's first stage begins with (recipe.init): as a drafter, as its folder, and as the field in
# a draft's config.json that says where it came from.
IMPORTED = "imported"
WITH_LOOKUP = "with-lookup"  # the published draft with prompt lookup beside it (evaluation.with_lookup)
FINAL = "final"  # the field in a final draft's provenance.json that says how its stage was chosen, if one was

HUB_PREFIX = "hf:"
HUB_PART = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)  # an owner, a repository, a revision

GGUF_SUFFIX = ".gguf"
WHEEL_PREFIX = "wheel:"
WHEEL_FORM = f"{WHEEL_PREFIX}<package>==<version>/<path in the wheel>{GGUF_SUFFIX}"
_WHEEL = re.compile(r"wheel:([A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.!+]*)/(.+)", re.DOTALL)


def is_name(text: object) -> bool:
    """Tell whether a text may stand in paths and commands as it is."""
    return isinstance(text, str) and NAME.fullmatch(text) is not None


def checked_name(text: str, *, key: str = "") -> str:
    """Return `text` if it is a name. Raises ValueError, with the key, if it is none."""
    if not is_name(text):
        raise ValueError(f"{key}{': ' * bool(key)}{text!r} is no name; a name has {IS_NAME}")
    return text


def hub_source(text: str) -> tuple[str, str | None]:
    """Return repository and revision, None if not given, of hf:<owner>/<repository>[@revision]. Raises ValueError."""
    repository, at, revision = text.removeprefix(HUB_PREFIX).partition("@")
    if not text.startswith(HUB_PREFIX) or not is_repository(repository) or (at and not HUB_PART.fullmatch(revision)):
        raise ValueError(f"{text!r} is no repository of the hub; give {HUB_PREFIX}<owner>/<repository>[@revision]")
    return repository, revision or None


def readable_name(source: str, revision: str | None = None) -> str:
    """Return a readable name for what a source brings; every source and revision has its own."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", source.removeprefix(HUB_PREFIX)).strip("-.")[-60:]
    return f"{readable}-{sha256_text(source if revision is None else f'{source}@{revision}')[:8]}"


def is_repository(text: str) -> bool:
    """Tell whether a text is <owner>/<repository> as the hub has them."""
    parts = text.split("/")
    return len(parts) == 2 and all(HUB_PART.fullmatch(part) and ".." not in part and part[-1] not in ".-" for part in parts)


def is_gguf(source: str) -> bool:
    """Tell whether a target's source is a GGUF file, on this machine or in a wheel."""
    return source.startswith(WHEEL_PREFIX) or (source.endswith(GGUF_SUFFIX) and not source.startswith(HUB_PREFIX))


def wheel_source(text: str) -> tuple[str, str]:
    """Return <package>==<version> and the path of wheel:<package>==<version>/<path>. Raises ValueError for another form."""
    found = _WHEEL.fullmatch(text)
    parts = found[2].split("/") if found else []
    if found is None or not found[2].endswith(GGUF_SUFFIX) or not found[2].isprintable() or {"", ".", ".."} & set(parts):
        raise ValueError(f"{text!r} is no file of a wheel; give {WHEEL_FORM}")
    return found[1], found[2]
