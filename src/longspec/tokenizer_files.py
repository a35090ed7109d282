"""The files of a tokenizer, and the hash of them by which tokens, rows and draft vocabularies say whose they are. No torch."""

import json
from pathlib import Path
from typing import Any

from longspec.atomic_files import describe_files, sha256_text

# Written by save_pretrained or by the publishers of a model; whichever exist belong to the tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of a folder's tokenizer files."""
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def tokenizer_hash(files: dict[str, Any]) -> str | None:
    """Return the hash of the tokenizer among a manifest's files, the tokenizer's own or its target's; None: no such."""
    own = {name: files[name] for name in TOKENIZER_FILES if name in files}
    return sha256_text(json.dumps(own, sort_keys=True)) if own else None


def tokenizer_hash_of(folder: Path) -> str | None:
    """Return the hash of the tokenizer in a target's folder; None where there is none."""
    return tokenizer_hash(describe_files(folder, tokenizer_files(folder)))
