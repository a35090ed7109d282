"""Let one job at a time write into a folder, on any machine of a cluster: a stage's folder, or that of a shard of answers.

    out/lease.json: {"holder", "job", "host", "boot", "pid", "since", "released"}; its time is the holder's last beat

A lock of the file system answers at once on one machine. Between machines another job watches the beat: a holder whose beat
moves is alive. Clocks of two machines are never compared. A holder that was taken for dead finds another's name in the file as
soon as it goes on, and ends before it writes anything else. filelock has no such beat, and none of this.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from longspec.atomic_files import fsync_path
from longspec.distributed import log
from longspec.slurm import own_job

LEASE, LOCK = "lease.json", ".lock"
BEAT = 10.0  # seconds between two beats
STALE = 120.0  # seconds without a beat after which a holder counts as gone
SETTLE = 0.5  # seconds in which another job that takes the folder over at the same moment shows itself
HELD, RELEASED = b'"released": false', b'"released": true '  # equally long: one is written over the other
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class LeaseFile:
    """Hold a lease as it stands in a folder."""

    holder: dict[str, Any]  # empty for a file that is no JSON, whose holder is unknown
    beat: int
    is_released: bool  # given back by its holder

    def __str__(self) -> str:
        job, host, pid = (self.holder.get(name) for name in ("job", "host", "pid"))
        return f"{f'Slurm job {job}' if job else 'a job'} on {host or 'an unknown machine'}, process {pid or 'unknown'}"


def read(out: Path) -> LeaseFile | None:
    """Read the lease of a folder; None if no job has held it yet."""
    try:
        # open(), not stat(): only then does NFS ask its server for the newest file and its time.
        with (out / LEASE).open("rb") as handle:
            beat, text = os.fstat(handle.fileno()).st_mtime_ns, handle.read()
    except FileNotFoundError:
        return None
    holder: dict[str, Any] = {}
    with suppress(TypeError, ValueError):
        holder = dict(json.loads(text))
    return LeaseFile(holder, beat, bool(holder.get("released")))


class Lease:
    """Hold a folder for a job's rank 0, until release() or the end of the process."""

    # Kept open: beats and the release go to this very file, also after another lease has taken its name.
    def __init__(self, out: Path, holder: str, file: BinaryIO, lock: TextIO) -> None:
        self.out, self.holder = out, holder
        self._file, self._lock, self._ended = file, lock, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """End this process at once if the folder is no longer this job's. Raises OSError if the lease cannot be read.

        Whatever ran on the way out would write into another job's folder.
        """
        found = read(self.out)
        if found is None or found.holder.get("holder") != self.holder:
            now = f"is {found} now" if found else "is gone"
            why = f"this job gave no sign of life for {STALE:g} s, or the file was changed by hand"
            log(f"error: {self.out / LEASE}: the holder of this folder {now}: {why}; it ends and writes nothing more")
            os._exit(os.EX_TEMPFAIL)  # the reason is logged: torchrun adds none

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            # A disk that does not answer ends no job: it comes back, or another job takes over and check() finds its lease.
            with suppress(OSError):
                self.check()
                os.utime(self._file.fileno())  # needs no room on a full disk

    def release(self) -> None:
        """Give the folder back."""
        self._ended.set()
        with suppress(OSError):
            text = os.pread(self._file.fileno(), 2**16, 0)
            os.pwrite(self._file.fileno(), RELEASED, text.rindex(HELD))
            os.fsync(self._file.fileno())
        self._lock.close()


def acquire(out: Path, host: str | None = None) -> Lease:
    """Take the lease of a folder. Raises ValueError, which names the holder, while another job has it."""
    out.mkdir(parents=True, exist_ok=True)
    # Two machines may have one name, and a restarted machine has lost its processes.
    machine = {"host": host or socket.gethostname(), "boot": BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""}
    lock = (out / LOCK).open("w")
    is_locked = True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks, or the lock of another job; a dead machine's may stay for long
        is_locked, found = False, read(out)
        is_held = found is None or (not found.is_released and machine.items() <= found.holder.items())
        if isinstance(error, BlockingIOError) and is_held:
            raise _refusal(out, found) from None
    before = _wait_until_free(out, machine if is_locked else None)
    return Lease(out, *_write(out, machine, before), lock)


def _refusal(out: Path, found: LeaseFile | None) -> ValueError:
    who, end = found or "which has just begun", "end it"
    if found is not None:
        job, pid, host = (found.holder.get(name) for name in ("job", "pid", "host"))
        end = f"end it ({f'scancel {job}' if job else f'kill {pid} on {host}'})"
    return ValueError(f"{out}: another job is writing here ({who}); wait for it or {end}, then start again")


def _wait_until_free(out: Path, machine: dict[str, str] | None) -> LeaseFile | None:
    """Return the lease that may be taken over, None if there is none. Raises ValueError if its holder lives.

    machine: this machine, if this process has the folder's lock, else None. A holder on it has lost the lock, so it is gone.
    """
    found = read(out)
    if found is None or found.is_released:
        return found
    if machine is not None and machine.items() <= found.holder.items():
        log(f"{out / LEASE}: taken over from {found}, which is gone")
        return found
    log(f"{out / LEASE}: held by {found}; waiting up to {STALE:g} s for a sign of life from it")
    until = time.monotonic() + STALE
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, BEAT / 2))
        if (now := read(out)) != found:
            if now is None or now.is_released:
                return now
            raise _refusal(out, now)
    log(f"{out / LEASE}: taken over from {found}, which has given no sign of life for {STALE:g} s")
    return found


def _write(out: Path, machine: dict[str, str], before: LeaseFile | None) -> tuple[str, BinaryIO]:
    """Replace the lease `before` by our own; return its holder's id and open file. Raises ValueError if another job did so."""
    holder, since = uuid.uuid4().hex, time.strftime("%Y-%m-%dT%H:%M:%S%z")
    content = {"holder": holder, "job": own_job(), **machine, "pid": os.getpid(), "since": since, "released": False}
    beside = out / f".{LEASE}.{holder}.tmp"
    file = beside.open("x+b", buffering=0)
    try:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        os.fsync(file.fileno())
        if (now := read(out)) != before:
            raise _refusal(out, now)
        beside.replace(out / LEASE)
    finally:
        beside.unlink(missing_ok=True)
    fsync_path(out)
    time.sleep(SETTLE)
    if (now := read(out)) is None or now.holder.get("holder") != holder:
        raise _refusal(out, now)
    return holder, file
