"""The Hugging Face hub in memory, behind the methods of huggingface_hub's client, whose signatures are its own."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError


@dataclass
class Repository:
    """Files of each branch."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


class Hub:
    """`token` may write to the repositories of `owner`."""

    token, owner, address = "secret", "me", "http://hub"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}

    def client(self, endpoint: str, token: str) -> Any:
        """Stands in the place of HfApi."""
        made = create_autospec(HfApi, instance=True)
        made.endpoint = endpoint

        def create_repo(name: str, *, private: bool | None, exist_ok: bool) -> None:
            if endpoint != self.address:
                raise ConnectionError("nobody listens")
            refused = 401 if token != self.token else 403 if not name.startswith(f"{self.owner}/") else None
            if refused:
                raise HfHubHTTPError("not yours", response=httpx2.Response(refused, request=httpx2.Request("POST", endpoint)))
            assert exist_ok
            self.repositories.setdefault(name, Repository(bool(private)))

        def create_branch(name: str, *, branch: str, exist_ok: bool) -> None:
            assert exist_ok
            self.repositories[name].branches.setdefault(branch, {})

        def create_commit(name: str, operations: list[Any], *, commit_message: str, revision: str) -> Any:
            for each in operations:
                with each.as_file() as handle:
                    self.repositories[name].branches[revision][each.path_in_repo] = handle.read()
            assert commit_message
            return SimpleNamespace(commit_url=f"{endpoint}/{name}/commit/{'1' * 40}")

        made.create_repo.side_effect, made.create_branch.side_effect = create_repo, create_branch
        made.create_commit.side_effect, made.model_info.side_effect = create_commit, self.repositories.__getitem__
        return made
