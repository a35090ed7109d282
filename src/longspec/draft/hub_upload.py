"""Upload of a final draft folder to the Hugging Face hub. No torch: login nodes push too.

The token comes from HF_TOKEN alone, never from a login that was left on the machine; HF_ENDPOINT names another hub.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from longspec import chain_length
from longspec.atomic_files import check_files, files_below, read_json
from longspec.shown import brief

CARD = "README.md"
REQUIRED = ("config.json", "model.safetensors", "training_config.yaml", "provenance.json")
HUB = "https://huggingface.co"


def files_to_push(folder: Path) -> list[str]:
    """The names of the files of a final draft folder. Raises ValueError that names what is missing, strange or changed."""
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: not a final draft folder: {', '.join(missing)}: missing; make it by python -m longspec.draft final"
        )
    if "draft" not in read_json(folder / "config.json"):
        raise ValueError(f"{folder / 'config.json'}: not a draft's: the field draft is missing")
    provenance = read_json(folder / "provenance.json")
    if "files" not in provenance:
        raise ValueError(f"{folder / 'provenance.json'}: lists no files; put the folder together again")
    check_files(folder, provenance["files"])
    names = files_below(folder)
    chain_length.read_acceptance(folder)  # which came after the folder was put together
    strange = set(names) - provenance["files"].keys() - {"provenance.json", chain_length.FILE}
    if strange:
        raise ValueError(f"{folder}: {', '.join(sorted(strange))}: not in its provenance.json; move it elsewhere")
    return names


def push(folder: Path, card: str, repository: str, revision: str, *, private: bool) -> str:
    """Create the repository if need be and commit the folder with its card; the commit's address.

    Raises ValueError that says why in one line when the hub does not take it. One commit: all files or none.
    """
    names = files_to_push(folder)
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise ValueError("HF_TOKEN: not set; export a token with write access (hub: Settings, Access Tokens)")
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request, signed addresses among them
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or HUB, token=token)
    files = [CommitOperationAdd(name, folder / name) for name in names]
    files.append(CommitOperationAdd(CARD, card.encode()))
    try:
        api.create_repo(repository, private=True if private else None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ValueError(
                f"{repository}: is there already and is public; leave out --private, or make it private on the hub"
            )
        if revision != "main":
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.create_commit(repository, files, commit_message=f"Draft {folder.name}", revision=revision)
    except (HTTPError, OSError) as error:
        raise ValueError(f"{api.endpoint}/{repository}: {_reason(error)}") from error
    return str(commit.commit_url)


def _reason(error: Any) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = brief(error)
    if status == 401:
        return f"the hub does not accept HF_TOKEN; make a new one ({text})"
    if status == 403:
        return f"HF_TOKEN may not write there; give a token with write access to this owner's repositories ({text})"
    if status is not None:
        return f"the hub refuses with {status} ({text})"
    return f"no answer from the hub ({type(error).__name__}: {text})"
