"""A rank that hangs, is gone or has failed ends the job by its name, not after the collectives' long time limit.

Every rank keeps a line of its own in the launcher's key-value store: how often its watchdog has beaten, how many marks its
training has passed, and the last one's name. The watchdog of every rank reads all lines. The first cause found is
written into the store and is the cause for all.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from longspec.distributed import Ranks, end_at_once, log
from longspec.train.lifetime.job_status import reason_of

BEAT = 1.0  # seconds; all times below are in beats of this process, so that one that was stopped for a while blames nobody
LOOK = 5  # between two looks at the others: 512 ranks read each other's lines
# Without a beat for so long a rank is gone: after an error that a lost rank may be the cause of, when this rank was asked
# to stop, and when nothing says that something is wrong. A weight read from a slow disk keeps a living one from beating.
SILENT_AFTER_ERROR, SILENT_WHEN_ASKED, SILENT = 10, 20, 180
GRACE = 5  # for the rank that writes status.json to do so before the launcher hears of any rank's end
NAMED = 8  # of more ranks that are to blame the others are counted
LEFT = "left"
CAUSE = "cause"


@dataclass(frozen=True)
class Cause:
    """Why the job ends, and the ranks that are to blame and can write nothing; none when a rank reports its own error."""

    reason: str
    culprits: list[int]


class Watchdog:
    """A context of the training; ends this process when some rank is gone or makes no progress for `seconds`.

    `store` is a torch.distributed store for the watchdog alone (a clone), `write` puts a reason into status.json, on one
    rank that lives; `asked` tells whether this rank was asked to stop.
    """

    def __init__(
        self, store: Any, ranks: Ranks, seconds: float, write: Callable[[str], None], asked: Callable[[], bool] = lambda: False
    ) -> None:
        self.store, self.ranks, self.seconds, self.write, self.asked = store, ranks, seconds, write, asked
        self._everyone = range(ranks.world_size)
        self._lines = [f"line/{rank}" for rank in self._everyone]
        self._all_there = False
        self._beats, self._marks, self._place = 0, 0, "start"
        self._known = [""] * ranks.world_size
        self._passed = [0] * ranks.world_size
        self._heard_at, self._moved_at = [0] * ranks.world_size, 0
        self._troubled, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._where = f"{socket.gethostname()}, pid {os.getpid()}"
        store.set(f"where/{ranks.rank}", self._where)
        self._beat()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and self.ranks.world_size > 1:
            # Perhaps a collective whose other end is gone: the watchdog ends this process as soon as it knows why.
            self._troubled.set()
            self._wait_for_its_cause()
        self._ended.set()
        self._thread.join(GRACE * BEAT)
        with suppress(Exception):  # the store went with rank 0 or the launcher
            if error is not None:
                self._agree(Cause(f"rank {self.ranks.rank} ({self._where}): {reason_of(error)}", []))
            self.store.set(self._lines[self.ranks.rank], LEFT)

    def _wait_for_its_cause(self) -> None:
        """Give the thread the beats in which it finds a cause, if there is one; it then ends this process."""
        enough = self._beats + SILENT_AFTER_ERROR + GRACE
        for _ in range(4 * (SILENT_AFTER_ERROR + GRACE)):  # a store that does not answer stops the beats
            if not self._thread.is_alive() or self._beats >= enough:
                return
            self._thread.join(BEAT)

    def passed(self, place: str) -> None:
        """This rank has come by a mark: before every operation in which ranks wait for each other there must be one."""
        self._marks, self._place = self._marks + 1, place

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(self._lines[self.ranks.rank], f"{self._beats} {self._marks} {self._place}")

    def _watch(self) -> None:
        every = max(1, min(LOOK, int(self.seconds / 4)))
        while not self._ended.wait(BEAT):
            try:
                self._beat()
                if self._beats % every == 0 or self._troubled.is_set():
                    self._look()
                    cause = self._cause_of_another() or self._gone() or self._hung()
                    if cause is not None:
                        self._end(self._agree(cause))
            except Exception as error:  # whatever a store raises without its owner
                self._without_store(error)
                return

    def _look(self) -> None:
        """Read all lines, and note which have changed since the last look."""
        self._all_there = self._all_there or self.store.check(self._lines)
        if not self._all_there:
            return  # another rank has still to begin; multi_get would wait for it
        lines = [line.decode() for line in self.store.multi_get(self._lines)]
        for rank, line in enumerate(lines):
            if line != self._known[rank] or line == LEFT:
                self._heard_at[rank] = self._beats
        passed = [old if line == LEFT else int(line.split()[1]) for line, old in zip(lines, self._passed, strict=True)]
        if passed != self._passed:
            self._moved_at = self._beats
        self._known, self._passed = lines, passed

    def _cause_of_another(self) -> Cause | None:
        """The cause that another rank has found, or failed with."""
        return Cause(**json.loads(self.store.get(CAUSE))) if self.store.check([CAUSE]) else None

    def _gone(self) -> Cause | None:
        limit = SILENT_AFTER_ERROR if self._troubled.is_set() else SILENT_WHEN_ASKED if self.asked() else SILENT
        silent = [rank for rank in self._everyone if self._beats - self._heard_at[rank] > limit]
        if not self._all_there or not silent:
            return None
        return Cause(f"no sign of life for {limit} s: {self._names(silent)}", silent)

    def _hung(self) -> Cause | None:
        if max(self._passed) == 0 or self._beats - self._moved_at <= self.seconds:
            return None
        # Ranks that wait for a slower one stand still too; the culprits are those that came by least often.
        within = [rank for rank in self._everyone if self._known[rank] != LEFT]
        behind = [rank for rank in within if self._passed[rank] == min(self._passed[rank] for rank in within)]
        # Among ranks that came equally far, those without a beat are stopped processes, for which the others wait.
        behind = [rank for rank in behind if self._beats - self._heard_at[rank] > max(2, self.seconds / 2)] or behind
        others = ", for which the others wait" if len(behind) < self.ranks.world_size else ""
        return Cause(f"no progress for {self.seconds:g} s (runtime.watchdog_seconds): {self._names(behind)}{others}", behind)

    def _names(self, ranks: list[int]) -> str:
        """The ranks with their machines and processes, and where they were."""
        names = []
        for rank in ranks[:NAMED]:
            where, place = self.store.get(f"where/{rank}").decode(), self._known[rank].split(maxsplit=2)[2]
            names.append(f"rank {rank} ({where}) in {place}")
        return "; ".join(names) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")

    def _agree(self, cause: Cause) -> Cause:
        """The cause that was written first."""
        return Cause(**json.loads(self.store.compare_set(CAUSE, "", json.dumps(asdict(cause)))))

    def _end(self, cause: Cause) -> None:
        """End this process; one rank that lives writes the reason down, and the others give it the time to."""
        if self.ranks.rank in cause.culprits:
            faulthandler.dump_traceback(sys.stderr)
        writer = next((rank for rank in self._everyone if rank not in cause.culprits), 0)
        # Without culprits a rank has failed by an error of its own, which this rank may have run into too: then its main
        # thread knows more than the one line here, and is given the time to write that down.
        at_once = self.ranks.rank == writer and (cause.culprits or self._troubled.is_set())
        if not at_once and self._ended.wait(GRACE * BEAT):
            return
        if self.ranks.rank == writer:
            log(f"error: {cause.reason}")
            self.write(cause.reason)
        end_at_once(1)

    def _without_store(self, error: Exception) -> None:
        """The end of a job whose store is gone: with rank 0, or with a launcher that keeps it."""
        kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._ended.wait(GRACE * BEAT):
            return  # all is done, and the store's owner has left before this rank
        owner = "the launcher's process on the first machine" if kept_by_launcher else "rank 0"
        reason = f"{owner} is gone, and with it the ranks' key-value store ({str(error).splitlines()[0]})"
        log(f"rank {self.ranks.rank}: {reason}")
        while kept_by_launcher and not self._troubled.is_set():  # training itself does not need the store
            if self._ended.wait(BEAT):
                return
        # Nobody can be asked who is left; the same text from some ranks does no harm.
        if self.ranks.local_rank <= 1:
            self.write(reason)
        end_at_once(1)
