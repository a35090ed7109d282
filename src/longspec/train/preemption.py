"""End a training job early: after a signal, before its deadline, in a hang, or after too many steps that are not finite."""

import faulthandler
import json
import math
import signal
import time
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec import jsonl
from longspec.distributed import Ranks, log
from longspec.train.stage_folder import NonRetryableError

# If there are several reasons, the last in this order counts: on SIGINT a launcher sends its ranks SIGTERM and ends, and
# signals to a busy rank may arrive in any order. Ranks send each other the index of theirs.
SIGNALS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
REASONS = ("", *(f"signal {number.name}" for number in SIGNALS), "deadline")
# Ranks that wait for each other are late at the same moment; stacks written at once would be mixed up.
STAGGER = 1.0  # seconds between two ranks of a machine; short enough for torchrun, which kills the others after 30


class Stop:
    """Tell whether the job is to stop, and whether a save is due after `save_seconds`; all ranks agree.

    If a micro batch, a save or another part takes longer than `longest_part` seconds, this rank ends, whatever it waits for,
    and prints the stacks of all its threads to stderr; its launcher then ends the others.

    deadline: seconds since 1970, None = none; margin: seconds to spare before it. control: a group on CPUs for the ranks'
    agreement, so that asking at every micro batch waits for no GPU; None = this process is the only one.
    """

    def __init__(
        self, longest_part: float, deadline: float | None = None, margin: float = 0.0, control: Any = None, local_rank: int = 0
    ) -> None:
        self.longest_part = longest_part + STAGGER * local_rank
        self.deadline, self.margin, self.control = deadline, margin, control
        self.reason, self.save_due = "", False  # set when all ranks have agreed
        self.save_seconds, self._saved = math.inf, time.monotonic()  # most between two saves, and time of the last
        self._longest_batch, self.longest_save, self._first_save = 0.0, 0.0, 0.0  # seconds
        self._batch_began: float | None = None
        self._received = 0  # index into REASONS
        for number in SIGNALS:
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # except under nohup
                signal.signal(number, self._receive)

    def begin_part(self) -> None:
        """Begin a part of the training that may take at most `longest_part` seconds; this ends the part before."""
        faulthandler.dump_traceback_later(self.longest_part, exit=True)

    def _receive(self, number: int, _: object) -> None:
        self._received = max(self._received, 1 + SIGNALS.index(signal.Signals(number)))

    def before_micro_batch(self) -> bool:
        """Tell whether the job stops before the next micro batch, as `agreed` does; two calls are one micro batch apart."""
        now = time.perf_counter()
        if self._batch_began is not None:
            self._longest_batch = max(self._longest_batch, now - self._batch_began)
        self._batch_began = now
        self.begin_part()
        return self.agreed()

    def expect_save(self, longest: float, first: float) -> None:
        """Note the seconds of earlier jobs' longest save, 0 if there was none, and an estimate for the first one.

        Both are limited so that most of a short job is left for its steps.
        """
        left = math.inf if self.deadline is None else max(0.0, self.deadline - time.time())
        self.longest_save, self._first_save = min(longest, left / 4), min(first, left / 4)

    def saved(self, seconds: float) -> None:
        """Note that a save took so many seconds: the next one may take as long."""
        if self._batch_began is not None:  # including the held-out estimate before the save
            self._longest_batch = max(self._longest_batch, time.perf_counter() - self._batch_began - seconds)
        self.longest_save, self._batch_began = max(self.longest_save, seconds), None
        self._saved, self.save_due = time.monotonic(), False

    def agreed(self) -> bool:
        """Tell whether all ranks stop now, and set `reason`. A collective: all must call it, and all get the same answer."""
        asked = self._received
        # One more micro batch and a save must fit; saving to a shared disk may take twice as long the next time.
        needed = self._longest_batch + (2 * self.longest_save or self._first_save) + self.margin
        if self.deadline is not None and time.time() + needed >= self.deadline:
            asked = REASONS.index("deadline")
        due = time.monotonic() - self._saved >= self.save_seconds
        if self.control is not None:
            of_all = torch.tensor([asked, int(due)])
            dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=self.control)
            asked, due = of_all.tolist()
        self.reason, self.save_due = REASONS[asked], bool(due)
        return asked > 0


class SkippedSteps:
    """Record steps that were skipped because their loss or gradient was not finite; too many end the job."""

    def __init__(self, file: Path, ranks: Ranks, max_in_a_row: int) -> None:
        self.skipped_file, self.ranks, self.max_in_a_row = file, ranks, max_in_a_row
        self.in_a_row = 0
        self.before = set[int]()  # steps that an earlier attempt skipped
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            with suppress(ValueError):  # a line torn by the end of that attempt
                self.before.add(jsonl.parse(line)["step"])

    def check_step(self, step: int, losses: list[tuple[Any, Tensor]], *, skipped: bool) -> None:
        """Check a step, counted from 1, on all ranks. losses: row numbers and loss of each of this rank's micro batches.

        Raises ValueError after too many skipped steps in a row; NonRetryableError if an earlier attempt skipped some of them
        too, since every attempt computes the same. The first time a faulty GPU may be the cause.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        everyone: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everyone, [([int(row) for row in rows], float(loss)) for rows, loss in losses])
        batches = [batch for batches in everyone for batch in batches]
        # A finite loss may still have a gradient that is not finite; then any row may be the cause.
        bad = [rows for rows, loss in batches if not math.isfinite(loss)] or [rows for rows, _ in batches]
        rows = sorted(row for group in bad for row in group)
        if self.ranks.is_main:
            with self.skipped_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        log(f"WARNING step {step} skipped: loss or gradient is not finite; rows {rows} (see {self.skipped_file})", self.ranks)
        if self.in_a_row > self.max_in_a_row:
            again = self.before.intersection(range(step - self.in_a_row + 1, step + 1))
            fault = NonRetryableError if again else ValueError
            raise fault(
                f"step {step}: {self.in_a_row} steps in a row skipped, their loss or gradient is not finite (rows: "
                f"{self.skipped_file}). To go on from the last checkpoint, raise runtime.max_skipped_in_a_row. Or lower "
                "recipe.optimizer.lr, or correct the data (python -m longspec.data inspect), and train anew after: "
                f"{join(['rm', '-r', str(self.skipped_file.parent)])}"
            )
