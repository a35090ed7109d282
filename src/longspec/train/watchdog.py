"""A rank that hangs or is gone ends the job by name, not after the collectives' long time limit.

Every rank tells the launcher's key-value store how often it has come by; a thread of every rank watches all of them.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from longspec.distributed import Ranks, log

INTERVAL = 1.0  # seconds between two looks


class Watchdog:
    """Ends this process when some rank has made no progress for `seconds`; one rank that lives tells `on_hang` why first.

    `store` is a torch.distributed store for this thread alone (a clone).
    """

    def __init__(self, store: Any, ranks: Ranks, seconds: float, on_hang: Callable[[str], None]) -> None:
        self.store, self.ranks, self.seconds, self.on_hang = store, ranks, seconds, on_hang
        self._passed = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.store.set(f"where/{ranks.rank}", f"{socket.gethostname()}, pid {os.getpid()}")

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def passed(self) -> None:
        """This rank has come by: another micro batch or save is done."""
        self._passed += 1

    def _counts(self) -> list[int]:
        """How often each rank has come by; -1 for one that has not said anything yet."""
        keys = [f"passed/{rank}" for rank in range(self.ranks.world_size)]
        return [int(self.store.get(key)) if self.store.check([key]) else -1 for key in keys]

    def _watch(self) -> None:
        counts, moved_at = [-1] * self.ranks.world_size, [time.monotonic()] * self.ranks.world_size
        while not self._ended.wait(INTERVAL):
            try:
                self.store.set(f"passed/{self.ranks.rank}", str(self._passed))
                latest = self._counts()
            except Exception as error:  # the store went with the launcher, which ends this process, or rank 0's host is gone
                log(f"rank {self.ranks.rank}: the watchdog lost the launcher's store: {error}")
                return
            now = time.monotonic()
            moved_at = [now if new != old else at for new, old, at in zip(latest, counts, moved_at, strict=True)]
            counts = latest
            # Ranks that wait for a slower one stand still too; the culprits are those that came by least often.
            if now - max(moved_at) > self.seconds:
                self._end(counts)

    def _end(self, counts: list[int]) -> None:
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        if self.ranks.rank in behind:
            faulthandler.dump_traceback(sys.stderr)
        names = "; ".join(f"rank {rank} ({self._where(rank)})" for rank in behind)
        others = "" if len(behind) == len(counts) else ", for which the others wait"
        reason = f"no progress for {self.seconds:.0f} s (runtime.watchdog_seconds): {names}{others}"
        witnesses = [rank for rank in range(len(counts)) if rank not in behind] or behind
        if self.ranks.rank == witnesses[0]:
            log(f"error: {reason}")
            self.on_hang(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _where(self, rank: int) -> str:
        return self.store.get(f"where/{rank}").decode() if self.store.check([f"where/{rank}"]) else "never started"
