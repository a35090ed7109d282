"""A stand-in for the Hugging Face hub, on loopback: what huggingface_hub asks of repositories of data sets and models."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SMALL = 64  # bytes; larger files are large-file objects, whose SHA-256 the hub tells


@dataclass
class Repository:
    """Commits by their hash, and what branches and tags name."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str = ""  # whoever does not send it is refused
    gated: bool = False  # refused at the files alone, as the hub does
    damaged: bytes = b""  # sent behind every file's bytes


@dataclass
class Hub:
    """The server: its repositories and the requests it got."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, authorization

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> str:
        """A repository with one commit on `main`; returns the commit's hash."""
        self.repositories[name] = Repository({}, {}, **settings)
        return self.commit(name, files)

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """A new commit on `main`."""
        repository = self.repositories[name]
        commit = hashlib.sha1(repr((len(repository.commits), sorted(files))).encode()).hexdigest()
        repository.commits[commit] = files
        repository.refs["main"] = commit
        return commit

    def asked_for(self, ending: str) -> list[tuple[str, str, str | None]]:
        return [request for request in self.requests if request[0] == "GET" and request[1].endswith(ending)]


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {"type": "file", "path": path, "size": len(content), "oid": blob} | ({"lfs": large} if len(content) > SMALL else {})


def listing(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What a folder of a repository holds, its folders among it unless all files below are asked for."""
    inside = {name: name.removeprefix(folder) for name in files if name.startswith(folder)}
    entries = [entry(name, files[name]) for name, rest in inside.items() if recursive or "/" not in rest]
    below = {folder + rest.split("/")[0] for rest in inside.values() if "/" in rest}
    return entries + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(below)]


class Handler(BaseHTTPRequestHandler):
    """One request, answered from `hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Authorization")))
        parts = path.removeprefix("/api").removeprefix("/datasets").removeprefix("/models").removeprefix("/").split("/")
        repository = self.hub.repositories.get("/".join(parts[:2]))
        if repository is None or (repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}"):
            # So does the hub: whoever may not see a repository is not told that there is one.
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
            return
        revision = parts[3] if len(parts) > 3 else "main"
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif path.startswith("/api/"):
            self.send_about(repository, parts, commit)
        else:
            self.send_file(repository, "/".join(parts[4:]), commit)

    do_HEAD = do_GET

    def send_about(self, repository: Repository, parts: list[str], commit: str) -> None:
        """What the hub's API tells of a commit, or of a folder in it."""
        about: Any = {"id": "/".join(parts[:2]), "sha": commit, "siblings": [], "tags": [], "gated": repository.gated}
        if parts[2:3] == ["tree"]:
            folder = "".join(f"{part}/" for part in parts[4:])
            about = listing(repository.commits[commit], folder, "recursive=true" in self.path.lower())
        self.answer(200, json.dumps(about).encode())

    def send_file(self, repository: Repository, name: str, commit: str) -> None:
        if repository.gated:
            self.refuse(403, "GatedRepo", "Access to this dataset is restricted.")
            return
        if name not in repository.commits[commit]:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        content = repository.commits[commit][name]
        tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": commit}
        self.answer(200, content + repository.damaged, **tag)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
