"""Say in words what the counts in manifests of records, tokens and packed rows mean."""

from collections.abc import Mapping
from typing import Any

# Counts of records whose template rewrites what it laid out (longspec.data.chat.layout); not written at 0.
REWRITE_COUNTS = ("further_documents", "left_out_messages")
UNLIKE_SERVED, MAX_UNLIKE_SERVED = "unlike_served", 0.1  # of a dataset's documents
MAX_REASONS = 10
CUT_BY_LIMIT, MAX_CUT = "cut by new_tokens", 0.1  # a reason of a torn or dropped answer; share of a dataset's records


def unlike_served_warning(manifest: Mapping[str, Any]) -> str:
    """Return a warning of documents laid out otherwise than the target is asked; "" if they are a tenth or fewer.

    manifest: of a token shard or of packed rows.
    """
    unlike, documents, name = manifest.get(UNLIKE_SERVED, 0), manifest["documents"], manifest["dataset"]
    if unlike <= MAX_UNLIKE_SERVED * documents:
        return ""
    return (
        f"{name}: {unlike:,} of {documents:,} documents are laid out otherwise than this target is asked and answers, so a "
        f"draft learns what the target never writes. Have the target answer the questions itself: data.{name}.regenerate "
        "(docs/answers.md). Or lay it out without thoughts, as these answers are: enable_thinking (docs/records.md). Or train "
        "for the target that wrote them"
    )


def answer_reasons(counts: Mapping[str, Any]) -> str:
    """Return why records lack answers, the reasons of the most records first. counts: `answers` of a manifest."""
    found = sorted(((n, end, reason) for end, some in counts["reasons"].items() for reason, n in some.items()), reverse=True)
    return "; ".join(f"{n} x {end}: {reason}" for n, end, reason in found[:MAX_REASONS])


def cut_warning(manifest: Mapping[str, Any]) -> str:
    """Return a warning of records that lost an answer to the limit of new tokens, or have a torn one; "" for a tenth or fewer.

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
