"""The files between an evaluation and vLLM's environment: a job in, a line of answer for each request out.

Standard library alone, since both environments read this.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One text to decode. Temperature 0 is greedy; stop: tokens that end the text, which keeps them.

    best: how many of the likeliest tokens are told at each place of the text, with their logits.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stop: list[int]
    best: int = 0


@dataclass(frozen=True)
class Job:
    """A model and its requests. method: vLLM's name of the kind of draft, None to decode without; tokens: of each draft.

    draft: the folder of its weights, None for kinds that have none; positions: of the longest text with its drafts; repeats:
    how often each request is decoded.
    """

    model: str
    method: str | None
    draft: str | None
    tokens: int
    dtype: str
    positions: int
    repeats: int
    requests: list[Request]

    def write(self, path: Path) -> None:
        """Write the job as JSON, for read_job."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_job(path: Path) -> Job:
    """The job of a file. Raises ValueError for one that is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Job(**content | {"requests": [Request(**request) for request in content["requests"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: is no job of longspec.measure: {error}") from error


@dataclass(frozen=True)
class Answer:
    """One decoded text, as the engine told it.

    tokens: the text; steps: how many of them each step of the engine brought, the prompt's first; accepted, accepted_by_place:
    by how much vLLM's counters grew, the last for the first, second, ... drafted token; best: at each place (token, logit) of
    the likeliest ones, best first; seconds: from the first token to the end, of every repeat.
    """

    id: str
    tokens: list[int]
    steps: list[int]
    accepted: int
    accepted_by_place: list[int]
    seconds: list[float]
    best: list[list[tuple[int, float]]] = field(default_factory=list)

    def encode(self) -> str:
        """A line of JSON."""
        return json.dumps(asdict(self))


def answer_of(content: Any, vocabulary: int) -> Answer:
    """Return the answer that a parsed line holds. Raise ValueError, with the field, for one that is none.

    vocabulary: the target's number of tokens.
    """
    if not isinstance(content, dict):
        raise ValueError(f"no answer of longspec.measure.engines: {str(content)[:80]!r}")
    try:
        found = Answer(**{name: content[name] for name in content if name in Answer.__match_args__})  # an older one has more
    except TypeError as error:
        raise ValueError(f"no answer of longspec.measure.engines: {error}") from error
    tokens = _are(found.tokens, lambda token: _is_count(token) and token < vocabulary)
    steps = _are(found.steps, _is_count) and tokens and sum(found.steps) == len(found.tokens)
    faults = {
        "id": not isinstance(found.id, str),
        f"tokens (at least one, below {vocabulary})": not tokens or not found.tokens,
        "steps (adding up to the tokens)": not steps,
        "accepted": not _is_count(found.accepted),
        "accepted_by_place": not _are(found.accepted_by_place, _is_count),
        "seconds": not found.seconds or not _are(found.seconds, _is_number) or min(found.seconds) < 0,
        "best": not _are(found.best, lambda place: _are(place, lambda pair: _is_pair(pair, vocabulary))),
    }
    if wrong := [name for name, fault in faults.items() if fault]:
        raise ValueError(f"answer to {str(found.id)[:80]!r}: {wrong[0]}: is {str(content.get(wrong[0].split()[0]))[:80]}")
    return found


def _are(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list | tuple) and all(map(fits, values))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_pair(pair: Any, vocabulary: int) -> bool:
    """Tell whether a pair is a token of the vocabulary and a finite logit."""
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and _is_count(pair[0])
        and pair[0] < vocabulary
        and _is_number(pair[1])
    )
