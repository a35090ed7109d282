"""Which process on which machine controls, or controlled last, the jobs of a workflow's folder."""

import os
import socket
from pathlib import Path

from longspec.atomic_files import read_json, write_json
from longspec.distributed import stat_of
from longspec.lease import BOOT_ID

NOTE = Path(".snakemake/controller.json")


def _began(pid: int) -> str:
    """When a process began, in ticks of the kernel's clock; empty when it is no more."""
    fields = stat_of(pid)
    return f"{BOOT_ID.read_text().strip()} {fields[19]}" if fields else ""


def note_controller(folder: Path) -> None:
    """Write down that this process controls the folder's jobs from now on."""
    write_json(folder / NOTE, {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())})


def living_controller(folder: Path) -> str:
    """The process that may still control the folder's jobs, and what to do about it; empty when there is none."""
    if not (folder / NOTE).exists():
        return ""
    try:
        note = read_json(folder / NOTE)
        host, pid, began = note["host"], note["pid"], note["began"]
    except (ValueError, KeyError, TypeError):
        return f"{folder / NOTE} is damaged: make sure that no Snakemake works here, remove it"
    if host != socket.gethostname():
        return f"Snakemake was started here on {host} as process {pid}: look there (ssh {host} ps -p {pid}) whether it is gone"
    if began and _began(pid) == began:
        return f"Snakemake is still at work in {folder} (process {pid}): let it work, or end it"
    return ""
