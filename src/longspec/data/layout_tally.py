"""Counts over a shard's records: which have no layout and why, and how the others are laid out."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec.data.chat.encoding import Encoded
from longspec.data.chat.special_tokens import LayoutError

# Counts of records of which a template rewrites what it laid out (longspec.data.chat.layout), not written at 0.
REWRITE_COUNTS = ("further_documents", "left_out_messages")
UNLIKE_SERVED, MAX_UNLIKE_SERVED = "unlike_served", 0.1  # of a dataset's documents
MAX_REASONS = 10
CUT_BY_LIMIT, MAX_CUT = "cut by new_tokens", 0.1  # a reason why an answer is torn or dropped; of a dataset's records


def unlike_served_warning(manifest: Mapping[str, Any]) -> str:
    """Say how many documents of tokens or packed rows are laid out otherwise than the target is asked; "" for a tenth or fewer.

    manifest: of a token shard or of packed rows.
    """
    unlike, documents, name = manifest.get(UNLIKE_SERVED, 0), manifest["documents"], manifest["dataset"]
    if unlike <= MAX_UNLIKE_SERVED * documents:
        return ""
    return (
        f"{name}: {unlike:,} of {documents:,} documents are laid out otherwise than this target is asked and answers, so a "
        f"draft learns what the target never writes. Have the target answer the questions itself: data.{name}.regenerate in "
        "config/workflow.yaml (docs/answers.md), or train for the target that wrote these answers"
    )


def answer_reasons(counts: Mapping[str, Any]) -> str:
    """Say why records have not all their answers, the reasons of the most records first. counts: `answers` of a manifest."""
    found = sorted(((n, end, reason) for end, some in counts["reasons"].items() for reason, n in some.items()), reverse=True)
    return "; ".join(f"{n} x {end}: {reason}" for n, end, reason in found[:MAX_REASONS])


def cut_warning(manifest: Mapping[str, Any]) -> str:
    """Say how many records lost an answer to the limit of new tokens, or have a torn one; "" for a tenth or fewer.

    manifest: of records, answered by the target or not.
    """
    counts, name = manifest.get("answers"), manifest["name"]
    if not counts:
        return ""
    dropped = sum(found.get(CUT_BY_LIMIT, 0) for found in counts["reasons"].values())
    if dropped <= MAX_CUT * counts["records"]:
        return ""
    return (
        f"{name}: the limit of new tokens cut an answer of {dropped:,} of {counts['records']:,} records, so the draft sees few "
        f"long answers. Raise data.{name}.regenerate.new_tokens (docs/answers.md)"
    )


@dataclass
class Tally:
    """Counts over a shard: records skipped, by reason; documents laid out unlike served prompts.

    Of records whose template rewrites what it laid out (layout.py): documents beyond the first; messages in none of them.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)  # where the first record stands that was skipped for a reason
    unlike_served: int = 0
    further: int = 0
    left_out: int = 0

    def skip(self, place: int, error: LayoutError) -> None:
        """Count a record that has no layout, whichever of its messages is the cause."""
        reason = re.sub(r"\[\d+\]", "[]", str(error))
        self.skipped[reason] += 1
        self.first.setdefault(reason, place)

    def keep(self, documents: list[Encoded]) -> None:
        """Count a record's documents."""
        self.further += len(documents) - 1
        for document in documents:
            self.unlike_served += not document.as_served
            self.left_out += document.left_out

    def check(self, train: Path, records: int, most: float) -> None:
        """Raises ValueError when this shard alone skipped more than a share of the whole dataset's records.

        What all shards together may skip is checked where they meet (pack).
        """
        count = self.skipped.total()
        if count > most * records:
            reasons = "; ".join(
                f"{number} x {reason} (first: line {line_number(train, self.first[reason])})"
                for reason, number in self.skipped.most_common(10)
            )
            raise ValueError(
                f"{train}: {count} of {records} records have no layout, all in one shard, more than the share {most} "
                f"that max_rejected allows: {reasons}; filter or rewrite them with `align`, or raise max_rejected"
            )

    def describe(self, most: float) -> dict[str, Any]:
        """The counts for the manifest; `allowed` is the share of all shards' records that may be skipped."""
        reasons = {reason: {"count": self.skipped[reason], "first": self.first[reason]} for reason in sorted(self.skipped)}
        counts = {
            "skipped": {"count": self.skipped.total(), "allowed": most, "reasons": reasons},
            UNLIKE_SERVED: self.unlike_served,
        }
        # Not written at 0, so that manifests of data without such records, and what is made of them, stay as they were.
        beyond = zip(REWRITE_COUNTS, (self.further, self.left_out), strict=True)
        return counts | {name: count for name, count in beyond if count}


def line_number(path: Path, place: int) -> int:
    """The number, from 1, of the line that begins at a byte."""
    count = 1
    with path.open("rb") as handle:
        while place > 0:
            block = handle.read(min(place, 1 << 20))
            count, place = count + block.count(b"\n"), place - len(block)
    return count
