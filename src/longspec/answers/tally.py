"""The tally of a shard's records: counts, reasons, rate, and whether too many failed. No torch."""

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from longspec.answers.conversation import ENDS, FAILED, Conversation
from longspec.distributed import log
from longspec.shown import duration

TELL = 30.0  # seconds between two lines of progress
SHOWN = 10  # reasons in an error or a log


class Tally:
    """Counts over `total` records, of which those of `lines` were done before."""

    def __init__(self, total: int, lines: Iterable[dict[str, Any]]) -> None:
        self.total, self.ends, self.reasons = total, Counter[str](), Counter[tuple[str, str]]()
        self.answers = self.tokens = 0
        for line in lines:
            self._count(line["end"], line["reason"], line["answers"], line["tokens"])
        self._began = self._told = time.monotonic()
        self._before, self._tokens_before = self.ends.total(), self.tokens

    def count(self, conversation: Conversation) -> None:
        """Count one more, and tell now and then how far this is."""
        self._count(conversation.end, conversation.reason, conversation.answers, conversation.tokens)
        if time.monotonic() - self._told > TELL:
            self.tell()

    def _count(self, end: str, reason: str, answers: int, tokens: int) -> None:
        self.ends[end] += 1
        if end != FAILED:
            self.answers, self.tokens = self.answers + answers, self.tokens + tokens
        if reason:
            # One line for messages that differ in numbers alone; an address keeps its own.
            self.reasons[end, re.sub(r"(\w+://\S+)|\d+", lambda found: found[1] or "N", reason)] += 1

    def tell(self) -> None:
        """How far it is, how fast, and the time left."""
        self._told = time.monotonic()
        seconds, done = self._told - self._began, self.ends.total()
        new = done - self._before
        rate = (self.tokens - self._tokens_before) / max(seconds, 1e-9)
        left = f", {duration(seconds * (self.total - done) / new)} left" if new else ""
        failed = f", {self.ends[FAILED]:,} failed" if self.ends[FAILED] else ""
        log(f"{done:,} of {self.total:,} records, {rate:,.0f} tokens/s{left}{failed}")

    def check(self, most: float) -> None:
        """Raise ValueError, with the reasons, when more than this share of all records failed."""
        failed = self.ends[FAILED]
        if failed > most * self.total:
            found = [(count, reason) for (end, reason), count in self.reasons.most_common() if end == FAILED]
            reasons = "; ".join(f"{count} x {reason}" for count, reason in found[:SHOWN])
            raise ValueError(
                f"{failed} of {self.total} records failed, more than the share {most} that regenerate.max_failed allows: "
                f"{reasons}; what is answered stays, and the same command goes on with the others"
            )

    def describe(self) -> dict[str, Any]:
        """The counts for a manifest: the ends add up to `records`."""
        assert self.ends.total() == self.total
        return {
            "records": self.total,
            "ends": {end: self.ends[end] for end in ENDS},
            "reasons": {end: {reason: n for (of, reason), n in sorted(self.reasons.items()) if of == end} for end in ENDS},
            "answers": self.answers,
            "tokens": self.tokens,
        }
