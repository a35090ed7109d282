"""A rank ends with its launcher, so that none trains on alone. Imported before all that takes seconds to import."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from longspec.distributed import die_with_parent, is_launched, stat_of

# Signal of a rank to itself when the `deepspeed` command is gone: a request to stop, ignored where there was one before.
LAUNCHER_GONE = signal.SIGUSR1
LOCAL_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # variables that torchrun and DeepSpeed's launch.py set
INTERVAL = 1.0  # seconds between two looks


def die_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies, and stop it when the `deepspeed` command above that dies.

    The launcher of a rank under `deepspeed` is launch.py, which lives on and trains on without the command.
    """
    if sys.platform != "linux" or not is_launched():
        return
    die_with_parent()
    launcher = os.getppid()
    command, of_command = _parent(launcher), _is_by_deepspeed(launcher)
    orphaned = any(name in os.environ for name in LOCAL_LAUNCHERS) and _is_reaper(launcher)
    if orphaned or (of_command and _is_reaper(command)):
        sys.exit("error: the launcher was gone before this rank had begun")
    if of_command:
        threading.Thread(target=_stop_without, args=(command, launcher), name="launcher", daemon=True).start()


def _stop_without(command: int, launcher: int) -> None:
    while _parent(launcher) == command:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), LAUNCHER_GONE)


def _is_reaper(process: int) -> bool:
    """Whether it is one that takes on orphans: the first process, or a user's systemd. A container's first may be torchrun."""
    arguments = _arguments(process)
    return (process == 1 or "systemd" in arguments[0]) and not any("torch" in a or "deepspeed" in a for a in arguments)


def _is_by_deepspeed(process: int) -> bool:
    """Whether it is the launch.py of a `deepspeed` command on this machine, which gives it options that people leave out."""
    arguments = _arguments(process)
    return "deepspeed.launcher.launch" in arguments and any(a.startswith("--log_level=") for a in arguments)


def _arguments(process: int) -> list[str]:
    """A process's command line; [""] when it is no more."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _parent(process: int) -> int:
    """A process's parent; 0 when it is no more, or has none."""
    return int((stat_of(process) or ["", "0"])[1])
