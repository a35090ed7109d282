"""One job at a time writes into a stage's folder."""

import fcntl
from pathlib import Path
from typing import TextIO


def hold(out: Path) -> TextIO:
    """Hold a stage's folder until the returned file is closed or this process ends.

    Raises ValueError while another job on this machine holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    handle = (out / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ValueError(f"{out}: another training job is writing here; wait for it or end it, then start again") from None
    return handle
