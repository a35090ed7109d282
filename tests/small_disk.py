"""A disk that is full: a small file system that needs no rights, and what fills it."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_MB = 64


@contextmanager
def small_disk(folder: Path, megabytes: int = DISK_MB) -> Iterator[Path | None]:
    """The path of a file system of its own, mounted on `folder`; None where this user may mount none.

    It is mounted in a namespace for which no rights are needed, seen from outside through a process in it, and gone with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("unshare") is None:
        yield None
        return
    mount = 'mount -t tmpfs -o size="$0"m tmpfs "$1" && echo mounted && exec cat'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(megabytes), str(folder.resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        mounted = bool(keeper.stdout.readline())
        try:
            yield Path(f"/proc/{keeper.pid}/root{folder.resolve()}") if mounted else None
        finally:
            keeper.stdin.close()  # `cat` ends


def fill(folder: Path) -> Path:
    """Leave no room on the disk of `folder`; the file to remove afterwards."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as handle, suppress(OSError):
        while True:
            handle.write(bytes(2**16))
    return filler
