"""A stand-in for the Hugging Face hub, on loopback: what huggingface_hub asks of it to upload a model."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors", ".pth")  # kept as large-file objects, as the hub's own rules have it


@dataclass
class Repository:
    """Files of each branch."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


@dataclass
class Hub:
    """The server's state; `token` may write to the repositories of `owner`."""

    token: str = "secret"
    owner: str = "me"
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    requests: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does, as far as an upload needs it."""

    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def answer(self, status: int, content: Any = None) -> None:
        body = json.dumps({} if content is None else content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def allowed(self, name: str) -> bool:
        """Answers itself when not."""
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(401, {"error": "Invalid username or password."})
            return False
        if not name.startswith(f"{self.hub.owner}/"):
            self.answer(403, {"error": f"You don't have the rights to create a model under {name.split('/')[0]}"})
            return False
        return True

    def do_PUT(self) -> None:
        content = self.body()
        digest = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.objects[digest] = content
        self.answer(200)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").split("?")[0]
        if self.allowed(name):
            repository = self.hub.repositories[name]
            self.answer(
                200, {"id": name, "private": repository.private, "sha": "0" * 40, "tags": [], "downloads": 0, "likes": 0}
            )

    def do_POST(self) -> None:
        body = self.body()
        path = self.path.split("?")[0]
        self.hub.requests.append(path)
        if path == "/api/repos/create":
            self.create(json.loads(body))
            return
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
            return
        name = "/".join(path.removeprefix("/api/models/").removeprefix("/").split("/")[:2]).removesuffix(".git")
        if not self.allowed(name):
            return
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            uploads = [o | {"actions": {"upload": {"href": f"{self.hub.address}/objects/{o['oid']}"}}} for o in wanted]
            self.answer(200, {"transfer": "basic", "objects": uploads})
            return
        verb, branch = path.removeprefix(f"/api/models/{name}/").split("/", 1)
        if verb == "branch":
            self.hub.repositories[name].branches.setdefault(branch, {})
            self.answer(200)
        elif verb == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif verb == "commit":
            self.commit(self.hub.repositories[name].branches[branch], [json.loads(line) for line in body.splitlines()])
            address = f"{self.hub.address}/{name}/commit/{'1' * 40}"
            self.answer(200, {"commitUrl": address, "commitOid": "1" * 40, "success": True})
        else:
            self.answer(404, {"error": path})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self.allowed(name):
            return
        if name in self.hub.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"})
            return
        self.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
        self.answer(200, {"url": f"{self.hub.address}/{name}", "name": name, "id": name})

    def commit(self, branch: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                branch[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branch[value["path"]] = self.hub.objects[value["oid"]]


@contextmanager
def hub_upload() -> Iterator[Hub]:
    """The running stand-in."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
