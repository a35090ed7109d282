"""A server of the target that the job itself starts and ends."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longspec.distributed import log

# As longspec.measure.engines.vllm sets them for vLLM: nothing is reported, and no network is asked.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PAST_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LOOK = 1.0  # seconds between two checks whether it answers
ENDING = 20.0  # seconds in which it may end by itself


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


@contextmanager
def started(command: str, target: Path, minutes: float, output: Path) -> Iterator[str]:
    """Start a server and yield its address once it answers; it ends with the block. `output` gets what it prints.

    Raises ValueError if the server cannot be started or does not answer within `minutes`, or if it ended by itself, also when
    the block failed for that.
    """
    port = str(free_port())
    words = [word.replace("{model}", str(target)).replace("{port}", port) for word in shlex.split(command)]
    log(f"starting {shlex.join(words)}; it writes to {output}")
    address = f"http://127.0.0.1:{port}/v1"
    with output.open("wb") as printed:
        try:
            environment = ENVIRONMENT | os.environ
            process = subprocess.Popen(words, stdout=printed, stderr=printed, env=environment, start_new_session=True)
        except OSError as error:
            raise ValueError(f"regenerate.server: {words[0]} cannot be started on this machine: {error.strerror}") from error
    guard = _guard(process)
    try:
        _wait(process, address, minutes, output)
        yield address
    except Exception:
        if process.poll() is not None:
            raise ValueError(_ended(process, output)) from None
        raise
    finally:
        _end(process)
        guard.kill()
        guard.wait()


def _guard(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that kills the server and its children if this process is killed: its pipe then closes.

    Otherwise they would keep their memory, on GPUs too, and the next try would find none.
    """
    command = ["sh", "-c", 'read _; kill -s KILL -- "-$0"', str(process.pid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _wait(process: subprocess.Popen[bytes], address: str, minutes: float, output: Path) -> None:
    """Wait until the server answers. Raises ValueError if it ends first or takes too long."""
    began = time.monotonic()
    while process.poll() is None:
        if _answers(address):
            log(f"{address}: answers after {time.monotonic() - began:.0f} s")
            return
        if time.monotonic() - began > 60 * minutes:
            raise ValueError(
                f"regenerate.server_minutes: no answer after {minutes:g} minutes; raise it, or read what "
                f"the server has printed: {output}"
            )
        time.sleep(LOOK)
    raise ValueError(_ended(process, output))


def _answers(address: str) -> bool:
    """Tell whether the server answers, even if it only asks for a key. One that is still loading says 503."""
    try:
        PAST_PROXIES.open(f"{address}/models", timeout=LOOK * 5).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True


def _ended(process: subprocess.Popen[bytes], output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    return f"regenerate.server: the server ended with exit code {process.poll()}: {lines[-1]}; all it printed: {output}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children: by SIGTERM first, then by SIGKILL."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
    log("the server is ended")
