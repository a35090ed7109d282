"""Jobs in forks of a process that has imported what a training imports; so are the launchers and ranks that a job starts.

The imports take 5 s, and the tests start hundreds of processes. A job is a child of the tests as any other: it has a process
id, an environment, a working folder and an output of its own, and may be killed.

    python -m tests.warm_jobs DESCRIPTOR        the process that is forked; a request comes through the socket
"""

import atexit
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NoReturn, Self

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
LONGEST = 2**17  # bytes of a request: an environment and a command line
NAME = "longspec rank "
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POPEN = subprocess.Popen
# What starts Python's processes: they are forks of it.
LAUNCHERS = ("longspec.cluster", "deepspeed", "deepspeed.launcher.launch", "gpu.py")
VERBS = ("longspec.train",)
# Imported by a job when it knows its verb, its method and its target.
LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "longspec.cluster.launch",
    "longspec.cluster.preflight",
    "longspec.measure.evaluate",
    "longspec.methods.eagle3.method",
    "longspec.methods.glide.method",
    "transformers.models.qwen2.modeling_qwen2",
)


def is_pythons(command: Sequence[str]) -> bool:
    """Whether it is this Python that the command starts."""
    return command[0] == sys.executable


def can_fork(command: Sequence[str]) -> bool:
    """Whether pytest runs and the command is Python's; where there is a GPU none is, since CUDA cannot be used in a fork."""
    is_ours = "pytest" in sys.modules and is_pythons(command)
    return is_ours and sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def popen(command: Sequence[str], **options: Any) -> "POPEN[Any] | Fork":
    """A process of the tests', forked if it can be."""
    return Fork(_ask, command, **options) if can_fork(command) else POPEN(command, **options)


def rank_of(pid: int) -> int | None:
    """The rank that a process is by its name, if it is a fork."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name.removeprefix(NAME)) if name.startswith(NAME) else None


class Fork:
    """A process that is forked instead of started, with what tests and launchers use of Popen."""

    def __init__(
        self,
        fork: Callable[[dict[str, Any], list[int]], int],
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.text, self.returncode, self.stdout = args, text, None, None
        request = {"command": list(args), "environment": dict(os.environ if env is None else env)}
        request |= {"folder": str(cwd or Path.cwd()), "session": start_new_session}
        if stdout == subprocess.PIPE:
            read, output = os.pipe()
            self.stdout = os.fdopen(read, "rb")
        else:
            output = _descriptor(stdout, 1)
        self.pid = fork(request, [output, output if stderr == subprocess.STDOUT else _descriptor(stderr, 2)])
        if self.stdout is not None:
            os.close(output)

    def poll(self) -> int | None:
        try:
            if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            if self.returncode is None:  # else a signal's handler asked meanwhile
                raise
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        latest = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > latest:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        return code

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[Any, None]:
        """Return all that it has printed when it has ended. Raises TimeoutExpired with what there is by then; call it once."""
        began, parts = time.monotonic(), []
        if (output := self.stdout) is not None:
            reader = threading.Thread(target=lambda: parts.extend(iter(lambda: output.read1(2**16), b"")), daemon=True)
            reader.start()
            reader.join(timeout)
            if reader.is_alive():  # it may have ended and left a process behind
                raise subprocess.TimeoutExpired(self.args, timeout or 0, b"".join(parts))
            output.close()
        self.wait(None if timeout is None else began + timeout - time.monotonic())
        return b"".join(parts).decode() if self.text else b"".join(parts), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def _descriptor(file: IO[Any] | int | None, own: int) -> int:
    if isinstance(file, int) and file < 0:
        raise ValueError(f"{file}: a fork prints into files, and into one pipe by stdout=PIPE")
    return own if file is None else file if isinstance(file, int) else file.fileno()


def _ask(request: dict[str, Any], outputs: list[int]) -> int:
    """Start the request in a child of this process; return its id."""
    server = _server()
    _adopt(True)  # else it would be the server's child, which only that could wait for
    socket.send_fds(server, [json.dumps(request).encode()], outputs)
    pid = int(server.recv(32))
    _adopt(False)  # whom a job leaves behind goes to the system, as everywhere
    return pid


def _popen_of_launcher(args: Sequence[str], preexec_fn: Callable[[], None] | None = None, **options: Any) -> POPEN[Any] | Fork:
    """Start a process of a launcher: Python's are forked from it, others and captured ones are started as ever."""
    if not is_pythons(args) or options.get("stderr") == subprocess.PIPE:
        return POPEN(args, preexec_fn=preexec_fn, **options)
    return Fork(partial(_fork, prepare=preexec_fn or (lambda: None)), args, **options)


def _fork(request: dict[str, Any], outputs: list[int], prepare: Callable[[], None]) -> int:
    """Fork this process; the child runs the request, ends, and runs nothing of the launcher's stack.

    Else torchrun's `finally` would speak to the store through the socket that the child shares with the launcher, and
    a signal before the child has handlers of its own would be torchrun's: the launcher then waits for ever.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    if pid := os.fork():
        while request["session"] and os.getsid(pid) != pid:  # which may be signalled as a group at once
            time.sleep(0.001)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return pid
    try:
        if request["session"]:
            os.setsid()
        prepare()
        _become(request, outputs)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        _end(_code_of(request["command"]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _adopt(orphans: bool) -> None:
    """Whether a process below this one whose parent has ended becomes its child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans))


@cache
def _server() -> socket.socket:
    """The way to the process that is forked. It ends with this one."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", __name__, str(other.fileno())]
    place, none = Path(__file__).parents[1], subprocess.DEVNULL
    POPEN(command, env=environment, pass_fds=[other.fileno()], cwd=place, stdin=none, stdout=none)
    other.close()
    return own


def _import() -> None:
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous
    import torch.distributed.run
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for module in LATE:
        importlib.import_module(module)
    get_checkpoint_conversion_mapping("qwen2")  # makes a thousand patterns for the first model that is loaded
    for verb in VERBS:
        program = importlib.import_module(f"{verb}.__main__")
        del sys.modules[program.__name__], sys.modules[verb].__main__  # it is run, not imported
    torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen = _popen_of_launcher
    # Records that nobody reads; the method's name in them is looked for in all modules, which takes half of torchrun's start.
    for unread in ("get_method_name", "construct_and_record_rdzv_event"):
        setattr(torch.distributed.elastic.rendezvous.dynamic_rendezvous, unread, lambda *_, **__: "")


def _next_request(requests: socket.socket) -> list[str]:
    """The command line of a request, in a fork for it alone."""
    tests = os.getppid()
    while True:
        message, outputs, *_ = socket.recv_fds(requests, LONGEST, 2)
        if not message:
            os._exit(0)
        if child := os.fork():
            os.waitpid(child, 0)
        elif os.fork():
            os._exit(0)
        else:
            while os.getppid() != tests:  # only then can they wait for it
                time.sleep(0.001)
            request = json.loads(message)
            if request["session"]:
                os.setsid()
            requests.send(str(os.getpid()).encode())
            requests.close()
            _become(request, outputs)
            for descriptor in outputs:
                os.close(descriptor)
            return request["command"]
        for descriptor in outputs:
            os.close(descriptor)


def _become(request: dict[str, Any], outputs: list[int]) -> None:
    """Take on the environment, folder and outputs of a process of its own."""
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # which the environment decides anew
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [place for place in places if place and place not in sys.path]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name = NAME + os.environ["RANK"] if "RANK" in os.environ else "longspec job"
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _code_of(command: list[str]) -> int:
    """Run the command, its last words written as Python writes them; the exit code, or a signal's number below zero."""
    try:
        _run(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except BaseException as fault:
        sys.excepthook(*sys.exc_info())
        if isinstance(fault, KeyboardInterrupt):
            return -signal.SIGINT
    else:
        return 0
    return 1


def _end(code: int) -> NoReturn:
    """End as the interpreter does, from whatever depth: threads waited for, exit functions run, outputs written.

    It flushes no other file: a job closes what it writes.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            output.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run(command: list[str]) -> None:
    """Run a module, a program or a script as `python` does."""
    _, *words = command
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    is_launcher = (words[1] if words[0] == "-m" else Path(words[0]).name) in LAUNCHERS
    subprocess.Popen = _popen_of_launcher if is_launcher else POPEN  # type: ignore[misc]
    os.execve = _in_place
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _in_place(_: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the command that this process would become, which would lose what is imported."""
    os.environ.clear()
    os.environ.update(environment)
    _run(command)
    sys.exit()


def main() -> None:
    """Import, and from then on fork; returns in no process but a job's, when it has run."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the tests
    _import()
    gc.collect()
    gc.freeze()
    _run(_next_request(requests))


if __name__ == "__main__":
    main()
