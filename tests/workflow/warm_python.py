"""A `python` for shells: its processes are forks of one that has imported what they import, which takes 5 s each time.

    python -m tests.workflow.warm_python FOLDER        the process that is forked; it ends with the one that started it

FOLDER/bin/python hands its command line over, lives as long as the fork, ends as it does, and passes signals on; SIGKILL to it
is SIGKILL to the fork. For what it asks Linux to do when its parent dies, the fork's parent (a keeper) dies with that of
FOLDER/bin/python. FOLDER/forks/PID holds the fork's process id.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests import warm_jobs

LATE = ("snakemake.cli", "longspec.workflow.plan", "longspec.data.tokenize", "longspec.data.pack.packing")
LATE += ("longspec.target.train", "longspec.report.page", "longspec.draft.trained", "longspec.states.build")
LATE += ("pyarrow", "transformers")
SERVER, KEEPER = "chaos server", "chaos keeper"  # names of the processes that are no job's
CLIENT = """#!{python} -ISu
import json, os, signal, socket, sys
folder, parent = {folder!r}, os.getppid()
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = dict(command=[{python!r}, *sys.argv[1:]], environment=dict(os.environ), folder=os.getcwd(), session=False)
socket.send_fds(server, [json.dumps(dict(request, client=os.getpid())).encode()], [1, 2])
fork = int(server.recv(32))

def pass_on(number, frame):
    try:
        os.killpg(fork, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, pass_on)
server.settimeout(0.1)
told = False
while True:
    try:
        status = server.recv(32)
        break
    except TimeoutError:
        if os.getppid() != parent and not told:
            server.send(b"parent died")
            told = True
if not status:
    while os.path.exists("/proc/%d" % fork):
        signal.sigtimedwait([], 0.1)
code = int(status or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def _named(name: str) -> None:
    ctypes.CDLL(None).prctl(warm_jobs.PR_SET_NAME, name.encode())


def _keep(client: socket.socket, folder: Path) -> None:
    """Fork what a client asks for, tell how it ends, and have it end as the client says."""
    _named(KEEPER)
    message, outputs, *_ = socket.recv_fds(client, warm_jobs.LONGEST, 2)
    request = json.loads(message)
    ready, begin = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(begin)
        os.read(ready, 1)  # until it can be found by its client's id
        os.close(ready)
        client.close()
        os.setpgid(0, 0)
        warm_jobs._become(request, outputs)
        for descriptor in outputs:
            os.close(descriptor)
        warm_jobs._end(warm_jobs._code_of(request["command"]))
    os.close(ready)
    (folder / "forks" / str(request["client"])).write_text(str(fork))
    try:
        client.send(str(fork).encode())
    except OSError:  # killed before it was told
        os.kill(fork, signal.SIGKILL)
        os._exit(0)
    os.close(begin)
    for descriptor in outputs:
        os.close(descriptor)

    def tell() -> None:
        _, status = os.waitpid(fork, 0)
        with suppress(OSError):
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)

    threading.Thread(target=tell).start()
    try:
        told = client.recv(32)
    except OSError:
        told = b""
    if not told:
        with suppress(ProcessLookupError):
            os.kill(fork, signal.SIGKILL)
    os._exit(0) if told else threading.Event().wait()


def main() -> None:
    """Import, then fork for each client."""
    folder = Path(sys.argv[1])
    for name in ("bin", "forks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _named(SERVER)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warm_jobs._import()
    for module in LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    client = folder / "bin/python"
    address = f"\0{SERVER} {os.getpid()}"  # a path may have 107 letters, and a test's folder has more
    client.write_text(CLIENT.format(python=sys.executable, folder=str(folder), address=address))
    client.chmod(0o755)
    (folder / "path.sh").write_text(f'PATH="{folder}/bin:$PATH"\n')
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end by themselves
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        while True:
            connection, _ = server.accept()
            if not os.fork():
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(connection, folder)
            connection.close()


if __name__ == "__main__":
    main()
