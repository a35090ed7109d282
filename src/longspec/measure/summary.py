"""Figures of a drafter's lines for each task, temperature, tree shape and bucket of context length."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768)  # the first context length of each bucket, in tokens; the last is open
SUMS = ("new_tokens", "rounds", "tokens_compared", "mismatches", "near_ties")
SECONDS = ("seconds_plain", "seconds_speculative", "seconds_draft", "seconds_target")

Line = dict[str, Any]
Row = dict[str, Any]


def bucket_of(context_tokens: int) -> int:
    """The number of the bucket that a context length lies in."""
    return bisect_right(EDGES, context_tokens) - 1


def bucket_name(number: int) -> str:
    """0-1k, 1-2k, ... 32k+."""
    low = EDGES[number] // 1024
    return f"{low}k+" if number == len(EDGES) - 1 else f"{low}-{EDGES[number + 1] // 1024}k"


def summarize(lines: Iterable[Line]) -> list[Row]:
    """A row for each task, temperature, shape and filled bucket, in the order of the lines and then of the buckets."""
    groups: dict[str, dict[int, list[Line]]] = {}
    for line in lines:
        name = f"{line['task']} {line['temperature']} {line['shape']}"
        groups.setdefault(name, {}).setdefault(bucket_of(line["context_tokens"]), []).append(line)
    return [_row(number, held[number]) for held in groups.values() for number in sorted(held)]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if under and over is not None else None


def _row(bucket: int, lines: list[Line]) -> Row:
    """The figures of some lines of one task and setting. A figure that nothing was measured for is None.

    position_acceptance: of the rounds in which all drafted tokens before it were kept, the share in which the first,
    second, ... was kept too; tokens a second are those after the prompt.
    """
    sums = {name: sum(line[name] for line in lines) for name in SUMS}
    told = [name for name in SECONDS if all(line[name] is not None for line in lines)]  # an engine may not tell all
    seconds = dict.fromkeys(SECONDS) | {name: sum(line[name] for line in lines) for name in told}
    by_place = zip(*(line["positions"] for line in lines), strict=True)
    positions = [[sum(counts) for counts in zip(*pairs, strict=True)] for pairs in by_place]
    return {
        **{name: lines[0][name] for name in ("task", "temperature", "shape")},
        "context": bucket_name(bucket),
        "prompts": len(lines),
        **{name: sums[name] for name in SUMS},
        "acceptance_length": _ratio(sums["new_tokens"], sums["rounds"]),
        "position_acceptance": [_ratio(kept, reached) for kept, reached in positions],
        "tokens_per_second": _ratio(sums["new_tokens"], seconds["seconds_speculative"]),
        "tokens_per_second_plain": _ratio(sums["new_tokens"], seconds["seconds_plain"]),
        "speed_up": _ratio(seconds["seconds_plain"], seconds["seconds_speculative"]),
        "draft_share": _ratio(seconds["seconds_draft"], seconds["seconds_speculative"]),
    }
