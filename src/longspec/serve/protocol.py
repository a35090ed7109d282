"""The files between an evaluation and vLLM's environment: a job in, a line of answer for each request out.

Standard library alone, since both environments read this.
"""

import json
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
        raise ValueError(f"{path}: is no job of longspec.evaluate: {error}") from error


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


def answer_of(content: dict[str, Any]) -> Answer:
    """The answer that a parsed line holds. Raises ValueError for one that is none."""
    try:
        return Answer(**{name: content[name] for name in content if name in Answer.__match_args__})  # an older one has more
    except TypeError as error:
        raise ValueError(f"no answer of longspec.serve: {error}") from error
