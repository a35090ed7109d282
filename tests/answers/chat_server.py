"""A server for tests, which replies to chats as a function says, and keeps what it was asked."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status and body


def said(text: str | None, finish: str = "stop", **more: Any) -> Reply:
    """A server's answer."""
    choice = {"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 3}}


def echo(body: dict[str, Any], number: int) -> Reply:
    """The last question, and how many messages came before it."""
    return said(f"{body['messages'][-1]['content']} after {len(body['messages']) - 1}")


class Server(ThreadingHTTPServer):
    """Replies as `reply` says, by the request and how often the same one came before; keeps what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply], name: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.name, self.owner, self.listed = name, "", b""  # of the model; what is said in its place
        self.key = ""  # that it wants
        self.reply, self.seen, self.asked, self.keys = reply, Counter[str](), [], set()  # type: ignore[var-annotated]
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._send((401, {"message": "no key"}))
        return self._send((200, self.server.listed or {"data": [{"id": self.server.name, "owned_by": self.server.owner}]}))

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server, body = self.server, json.loads(text)
        with server.lock:
            number = server.seen[text]
            server.seen[text] += 1
            server.asked.append(body)
            server.keys.add(self.headers.get("Authorization"))
        with suppress(OSError):  # nobody waits for it any more
            self._send(server.reply(body, number))

    def _send(self, reply: Reply) -> None:
        status, body = reply
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After-Ms", "1")  # nobody waits before a second try
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(
    reply: Callable[[dict[str, Any], int], Reply], name: str = "some/test", owner: str = "somebody"
) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(reply, name)
    server.owner = owner
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def question(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]
