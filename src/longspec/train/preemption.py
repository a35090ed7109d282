"""What ends a training job early: a request (signals), its deadline, a hang, and too many steps that are not finite."""

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
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS
from longspec.train.stage_folder import NonRetryableError

# Of several reasons the last one counts: a launcher that is told SIGINT sends its ranks SIGTERM and ends, and signals that
# wait for a busy rank may arrive in any order. Ranks tell each other the index of theirs.
SIGNALS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
REASONS = ("", *(f"signal {number.name}" for number in SIGNALS), "deadline")
# Ranks that wait for each other are late at the same moment; written at once their stacks would be one jumble.
STAGGER = 1.0  # seconds between two ranks of a machine, few enough for torchrun, which kills the others after 30


class Stop:
    """Tells whether the job is to stop, and whether it has not saved for `save_seconds`, agreed between the ranks.

    A micro batch, a save or another part that takes longer than `longest_part` seconds ends this rank, whatever it waits
    for, with the stacks of all its threads on stderr; its launcher then ends the others.

    `deadline` is a time of day in seconds since 1970, None = none; `margin` are seconds to spare before it. Ranks agree over
    `control`, a group on CPUs, so that asking at every micro batch waits for no GPU; None = this process is the only one.
    """

    def __init__(
        self, longest_part: float, deadline: float | None = None, margin: float = 0.0, control: Any = None, local_rank: int = 0
    ) -> None:
        self.longest_part = longest_part + STAGGER * local_rank
        self.deadline, self.margin, self.control = deadline, margin, control
        self.reason, self.save_due = "", False  # once all ranks have agreed
        self.save_seconds, self._saved = math.inf, time.monotonic()  # most between two saves, and when the last one was
        self._longest_batch, self.longest_save, self._first_save = 0.0, 0.0, 0.0  # seconds
        self._batch_began: float | None = None
        self._received = 0  # the index of a reason
        for number in SIGNALS:
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # under nohup
                signal.signal(number, self._receive)

    def begin_part(self) -> None:
        """Begin a part of the training that must not take longer than `longest_part` seconds; the part before has ended."""
        faulthandler.dump_traceback_later(self.longest_part, exit=True)

    def _receive(self, number: int, _: object) -> None:
        self._received = max(self._received, 1 + SIGNALS.index(signal.Signals(number)))

    def before_micro_batch(self) -> bool:
        """Tell whether the job stops before the next micro batch, as `agreed`; two calls are a micro batch apart."""
        now = time.perf_counter()
        if self._batch_began is not None:
            self._longest_batch = max(self._longest_batch, now - self._batch_began)
        self._batch_began = now
        self.begin_part()
        return self.agreed()

    def expect_save(self, longest: float, first: float) -> None:
        """Note the seconds of the longest save of the jobs before, 0 if there was none, and what the first one may take.

        Both must leave most of a short job to its steps.
        """
        left = math.inf if self.deadline is None else max(0.0, self.deadline - time.time())
        self.longest_save, self._first_save = min(longest, left / 4), min(first, left / 4)

    def saved(self, seconds: float) -> None:
        """Note that a save is done, which took so long: the next one may take as long."""
        if self._batch_began is not None:  # with what was estimated before the save
            self._longest_batch = max(self._longest_batch, time.perf_counter() - self._batch_began - seconds)
        self.longest_save, self._batch_began = max(self.longest_save, seconds), None
        self._saved, self.save_due = time.monotonic(), False

    def agreed(self) -> bool:
        """Tell whether all ranks stop now, and in `reason` why. A collective: all call it, and all get one answer."""
        asked = self._received
        # One more micro batch and a save must fit, and saving to a shared disk may take twice as long the next time.
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
    """Writes down the steps that were skipped because their loss or gradient was not finite; too many end the job."""

    def __init__(self, file: Path, ranks: Ranks, max_in_a_row: int) -> None:
        self.skipped_file, self.ranks, self.max_in_a_row = file, ranks, max_in_a_row
        self.in_a_row = 0
        self.before = set[int]()  # steps that an attempt before has skipped
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            with suppress(ValueError):  # torn by the end of that attempt
                self.before.add(jsonl.parse(line)["step"])

    def check_step(self, step: int, losses: list[tuple[Any, Tensor]], *, skipped: bool) -> None:
        """Look at a step, counted from 1, on all ranks; `losses`: row numbers and loss of each micro batch of this rank.

        Raises ValueError after too many skipped ones in a row; NonRetryableError where it was so in an attempt before, since
        every attempt computes the same: once it may be a sick GPU.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        everyone: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(everyone, [([int(row) for row in rows], float(loss)) for rows, loss in losses])
        batches = [batch for batches in everyone for batch in batches]
        # A finite loss may still have a gradient that is not; then any row may be the cause.
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
                f"{join(['rm', '-r', str(self.skipped_file.with_name(CHECKPOINTS)), str(self.skipped_file)])}"
            )
