"""Identify, read, pair and sum the lines of an evaluation: one for each prompt, temperature and shape.

Suffixes: P prompts, sorted by task and prompt, the same for every drafter.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspec import jsonl
from longspec.chain_length import pooled
from longspec.decode.levels import shape_of, stored
from longspec.engines import OURS
from longspec.measure.tasks import Prompt, Setting, Settings

Line = dict[str, Any]
Work = dict[str, tuple[Prompt, Setting]]  # by key_text
Array = npt.NDArray[Any]
# From a place, the plain text's token there and the other one: the distance between plain decoding's logits of the two, and the
# largest distance of a near-tie.
Gap = Callable[[int, int, int], tuple[float, float]]
FAULT = "fault"  # field of the only line of a file without measurements: why the engine has none (evaluate --keep-fault)
EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768)  # the first context length of each bucket, in tokens; the last is open
KEY = ("task", "prompt", "temperature", "shape", "prompt_hash")  # fields that identify a line
COUNTS = ("prompt", "record", "context_tokens", "new_tokens", "rounds")
SUMS = ("new_tokens", "rounds", "tokens_compared", "mismatches", "near_ties")
SECONDS = ("seconds_plain", "seconds_speculative", "seconds_draft", "seconds_target")  # null: the engine does not report it


class WrongTextError(ValueError):
    """Report greedy text that differs from plain decoding."""


@dataclass(frozen=True)
class Comparison:
    """Hold how a text compares with plain decoding, up to the first difference: a near-tie, or else a fault.

    margin: the distance between plain decoding's own logits of the two tokens; margin_allowed: the largest of a near-tie. Both
    are None if no two tokens differ.
    """

    tokens_compared: int
    mismatches: int
    near_ties: int
    margin: float | None = None
    margin_allowed: float | None = None


def judge(plain: list[int], speculative: list[int], gap: Gap) -> Comparison:
    """Compare two texts up to and including the first difference; after it the contexts differ."""
    for place, (left, right) in enumerate(zip(plain, speculative, strict=False)):
        if left != right:
            margin, allowed = gap(place, left, right)
            return Comparison(place + 1, 1, int(margin <= allowed), margin, allowed)
    return Comparison(min(len(plain), len(speculative)), int(len(speculative) != len(plain)), 0)


def verdict_of(prompt: Prompt, setting: Setting, plain: list[int], fast: list[int], gap: Gap) -> Comparison:
    """Compare a greedy text with the plain one; a sampled text is not compared.

    Raises WrongTextError if the texts differ by more than a near-tie.
    """
    if setting.temperature > 0:
        return Comparison(0, 0, 0)
    verdict = judge(plain, fast, gap)
    if verdict.mismatches > verdict.near_ties:
        place = verdict.tokens_compared
        if verdict.margin is None:
            why = "one text ends before the other"
        else:
            why = f"the target's logits of the two lie {verdict.margin:.3g} apart, a tie's {verdict.margin_allowed:.3g} at most"
        raise WrongTextError(
            f"{prompt.task}, prompt {prompt.number}, {setting}: other tokens than plain decoding at token {place} "
            f"({plain[place - 1 : place]} became {fast[place - 1 : place]}; {why}): decoding is not lossless"
        )
    return verdict


def key_of(prompt: Prompt, setting: Setting, *, drafted: bool = True) -> Line:
    """Return the fields of KEY; a text without draft has shape None."""
    values = (prompt.task, prompt.number, setting.temperature, stored(setting.shape) if drafted else None, prompt.hash)
    return dict(zip(KEY, values, strict=True))


def key_text(line: Line) -> str:
    """Return a line's fields of KEY as one text."""
    return json.dumps([line.get(name) for name in KEY])


@dataclass(frozen=True)
class Evaluation:
    """Hold the measurements of one drafter on every prompt."""

    path: Path
    # Each [P]: task, data (its dataset), prompt_hash, the names of COUNTS and SECONDS, `kept N` and `reached N` for each place.
    columns: dict[str, Array]
    by_setting: dict[Setting, list[Line]]  # the main setting first; each list sorted by task and prompt
    left_out: dict[str, int] = field(default_factory=dict)  # by task: the number of prompts whose records are left out

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @property
    def lines(self) -> list[Line]:
        """Return the lines of every temperature and shape."""
        return [line for lines in self.by_setting.values() for line in lines]

    @property
    def main_lines(self) -> list[Line]:
        """Return the lines of the main setting, [P]."""
        return next(iter(self.by_setting.values()))

    def of_task(self, task: str | None) -> Array:
        """Return which prompts belong to a task, boolean [P]; None: all."""
        return np.ones(len(self["task"]), bool) if task is None else np.asarray(self["task"] == task)


def fault_in(path: Path) -> Line | None:
    """Return the line that says why an engine has no measurements; None if the file holds measurements."""
    first = next(iter(jsonl.read(path)), {})
    return first if FAULT in first else None


def read(path: Path, settings: Settings, left_out: Mapping[str, Collection[int]] | None = None) -> Evaluation:
    """Read a drafter's file, sorted by setting, task and prompt.

    left_out: by task, the records whose prompts are skipped. Raises ValueError for a line of other settings, and for a task
    without a round.
    """
    found: dict[Setting, list[Line]] = {setting: [] for setting in settings.settings}
    dropped: Counter[str] = Counter()
    tasks = list(settings.tasks)
    for number, row in enumerate(jsonl.read(path), 1):
        setting = Setting(row["temperature"], shape_of(row["shape"]))
        if setting not in found or row["task"] not in tasks or row.get("engine", OURS) != settings.engine:
            raise ValueError(
                f"{path}: line {number}: task {row['task']}, {setting}, by {row.get('engine', OURS)}, is not what `evaluation` "
                "asks for (tasks, temperatures, shapes, engine); evaluate this drafter again (rule evaluate)"
            )
        if row["record"] not in (left_out or {}).get(row["task"], ()):
            found[setting].append(row)
        elif setting == settings.settings[0]:
            dropped[row["task"]] += 1
    for setting, rows in found.items():
        rows.sort(key=lambda row: (tasks.index(row["task"]), row["prompt"]))
        for task in tasks:
            own = [row for row in rows if row["task"] == task]
            if not own and dropped[task]:
                raise ValueError(
                    f"{path}: task: {task!r}: by all its {dropped[task]} prompts the published stage was chosen, so that they "
                    "do not judge it; measure more (`prompts` of evaluation, or of its bench), or choose none (final: last)"
                )
            if not any(row["rounds"] for row in own):
                raise ValueError(f"{path}: task: {task!r} has no prompt with a round at {setting}; give it other prompts")
    main = found[settings.settings[0]]
    columns = {name: np.array([row[name] for row in main]) for name in (*COUNTS, "task", "prompt_hash")}
    columns |= {name: np.array([row[name] for row in main], float) for name in SECONDS}
    columns["data"] = np.array([settings.tasks[row["task"]].texts for row in main])
    for place in range(settings.draft_tokens):  # how often the token at a place was kept, and all before it
        columns[f"kept {place}"], columns[f"reached {place}"] = np.array([row["positions"][place] for row in main]).T
    return Evaluation(path, columns, found, dict(dropped))


def check_pairs(first: Evaluation, other: Evaluation) -> None:
    """Raise ValueError, with the first prompt that differs, if two drafters were not measured on the same tokens."""
    prompts = (zip(one["task"], one["prompt"], one["prompt_hash"], strict=True) for one in (first, other))
    for left, right in zip_longest(*prompts):
        if left != right:
            task, prompt, _ = right or left
            raise ValueError(
                f"{other.path}: task {task}, prompt {prompt}: is another prompt than in {first.path}; only drafters of one "
                "target, on the same data with the same settings, can be compared; evaluate both again"
            )


def bucket_of(context_tokens: int) -> int:
    return bisect_right(EDGES, context_tokens) - 1


def bucket_name(number: int) -> str:
    """Return a bucket's name: 0-1k, 1-2k, ... 32k+."""
    low = EDGES[number] // 1024
    return f"{low}k+" if number == len(EDGES) - 1 else f"{low}-{EDGES[number + 1] // 1024}k"


def summarize(lines: Iterable[Line]) -> list[Line]:
    """Return a row for each task, temperature, shape and filled bucket, in the order of the lines, then of the buckets."""
    groups: dict[str, dict[int, list[Line]]] = {}
    for line in lines:
        name = f"{line['task']} {line['temperature']} {line['shape']}"
        groups.setdefault(name, {}).setdefault(bucket_of(line["context_tokens"]), []).append(line)
    return [
        {name: own[0][name] for name in ("task", "temperature", "shape")} | {"context": bucket_name(number)} | figures(own)
        for held in groups.values()
        for number, own in sorted(held.items())
    ]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if under and over is not None else None


def figures(lines: list[Line]) -> Line:
    """Return the figures of some lines of one setting; a figure without measurements is None.

    position_acceptance: for the first, second, ... drafted token, the share of rounds that kept it, among the rounds that kept
    all before it; tokens per second exclude the prompt.
    """
    sums = {name: sum(line[name] for line in lines) for name in SUMS}
    told = [name for name in SECONDS if all(line[name] is not None for line in lines)]  # an engine may not report all
    seconds = dict.fromkeys(SECONDS) | {name: sum(line[name] for line in lines) for name in told}
    positions = pooled(0.0, [line["positions"] for line in lines]).positions
    return {
        "prompts": len(lines),
        **{name: sums[name] for name in SUMS},
        "acceptance_length": _ratio(sums["new_tokens"], sums["rounds"]),
        "position_acceptance": [_ratio(kept, reached) for kept, reached in positions],
        "tokens_per_second": _ratio(sums["new_tokens"], seconds["seconds_speculative"]),
        "tokens_per_second_plain": _ratio(sums["new_tokens"], seconds["seconds_plain"]),
        "speed_up": _ratio(seconds["seconds_plain"], seconds["seconds_speculative"]),
        "draft_share": _ratio(seconds["seconds_draft"], seconds["seconds_speculative"]),
    }
