"""A server of the target that the job starts itself, and ends with itself."""

import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from longspec.distributed import die_with_parent, log

# As longspec.measure.engines.vllm asks of vLLM: nothing is reported, and nothing is asked of a network.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PAST_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LOOK = 1.0  # seconds between two looks whether it answers
PORTS = 3  # on which a server is tried before it must be something else that ends it
GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"
ENDING = 20.0  # that it has for its own way out


@contextmanager
def claimed_port() -> Iterator[int]:
    """A port that nobody listens on now, and that no other job of ours on this machine takes while the block lasts.

    Some servers, vLLM among them, listen on a port where another one of theirs listens already: each is then asked by turns.
    """
    while True:
        port = _free_port()
        # A name that the system knows as long as the socket lives, in the network namespace to which the port belongs.
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0longspec-answers-port-{port}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield port
            return


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def _is_taken(port: int) -> bool:
    """Whether somebody holds a port, be it only to connect from it; connections that are closed do not count."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("", port))
        except OSError:
            return True
    return False


@contextmanager
def started(
    command: str,
    target: Path,
    minutes: float,
    output: Path,
    *,
    port: int | None = None,
    keys: tuple[str, str] = ("regenerate.server", "regenerate.server_minutes"),
) -> Iterator[str]:
    """The address of a server that answers, for the length of a block; what it prints stands in `output`.

    port: None takes a free one, and another where somebody took it before the server did; keys: what sets command and minutes.
    Raises ValueError for a server that ends otherwise, within the block too, or gives no sign of life for so many minutes.
    """
    for number in range(PORTS):
        with claimed_port() if port is None else nullcontext(port) as at:
            words = [word.replace("{model}", str(target)).replace("{port}", str(at)) for word in shlex.split(command)]
            log(f"starting {shlex.join(words)}; it writes to {output}")
            process = _start(words, output, keys[0])
            guard = _guard(process)
            try:
                if _answers(process, f"http://127.0.0.1:{at}/v1", minutes, output, keys[1]):
                    yield f"http://127.0.0.1:{at}/v1"
                    return
            except Exception:
                if process.poll() is not None:
                    raise ValueError(_ended(process, output, keys[0])) from None
                raise
            finally:
                _end(process)
                guard.kill()
                guard.wait()
            if port is not None or number == PORTS - 1 or not _is_taken(at):
                raise ValueError(_ended(process, output, keys[0]))
            log(f"port {at} was taken before the server listened there; starting it again on another")


def _start(words: list[str], output: Path, key: str) -> subprocess.Popen[bytes]:
    """The server's process. Raises ValueError for a program that is not there."""
    with output.open("wb") as printed:
        try:
            return subprocess.Popen(
                words,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT | os.environ,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise ValueError(f"{key}: {words[0]} cannot be started on this machine: {error.strerror}") from error


def _guard(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Start what kills the server and all that it has started when this process is killed: the pipe to it closes then.

    The server's first process dies with this one by itself. Started through a shell it is that shell alone.
    """
    command = [sys.executable, "-c", GUARD, str(process.pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _answers(process: subprocess.Popen[bytes], address: str, minutes: float, output: Path, limit: str) -> bool:
    """Wait until the server answers; False for one that ends before it does."""
    began = time.monotonic()
    while process.poll() is None:
        with suppress(urllib.error.URLError, OSError), PAST_PROXIES.open(f"{address}/models", timeout=LOOK * 5):
            log(f"{address}: answers after {time.monotonic() - began:.0f} s")
            return True
        if time.monotonic() - began > 60 * minutes:
            raise ValueError(f"{output}: the server does not answer after {minutes:g} minutes; raise {limit}")
        time.sleep(LOOK)
    return False


def _ended(process: subprocess.Popen[bytes], output: Path, key: str) -> str:
    lines = output.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    return f"the server of {key} ended with exit code {process.poll()}: {lines[-1]}; all it printed: {output}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it has started, as it likes at first."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
    log("the server is ended")
