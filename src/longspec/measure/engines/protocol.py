"""What an evaluation and an engine's environment hand each other: a job in, a line of answer for each request out.

An engine is a module here, run as a program by the Python of its environment. Standard library alone, since both read this.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REFUSED = "refused"  # field of a line that stands in place of answers: why the engine gives none


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
    """A model and its requests. method: the engine's name of the kind of draft, None to decode without; tokens: of each draft.

    draft: the folder of its weights, None for kinds that have none; positions: of the longest text with its drafts; repeats:
    how often each request is decoded; scratch: a folder for what an engine makes of these files, which its next start finds.
    """

    model: str
    method: str | None
    draft: str | None
    tokens: int
    dtype: str
    positions: int
    repeats: int
    requests: list[Request]
    scratch: str = ""

    @property
    def files(self) -> str:
        """Return the names of what is loaded, for errors."""
        return " and ".join(filter(None, (self.model, self.draft)))


def read_job(path: Path) -> Job:
    """Read a job's file: its fields as JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Job(**content | {"requests": [Request(**request) for request in content["requests"]]})


@dataclass(frozen=True)
class Answer:
    """One decoded text, as the engine told it.

    tokens: the text; accepted: drafted tokens kept in each round, the last one's uncut; best: at each place (token, logit) of
    the likeliest ones, best first; seconds: from the first token to the end, of every repeat.
    """

    id: str
    tokens: list[int]
    accepted: list[int]
    seconds: list[float]
    best: list[list[tuple[int, float]]] = field(default_factory=list)


def within(kept: list[int], length: int) -> list[int]:
    """Return the rounds that begin within a text of this length; the last one is whole."""
    return [count for number, count in enumerate(kept) if 1 + number + sum(kept[:number]) < length]


def cut(text: list[int], request: Request) -> list[int]:
    """Return a text up to the token that ends it, and no longer than was asked for."""
    ends = (place for place, token in enumerate(text[: request.max_tokens], start=1) if token in request.stop)
    return text[: next(ends, request.max_tokens)]


def run(packages: tuple[str, ...], load: Callable[[Job], Any], answer: Callable[[Any, Request, int], Answer]) -> None:
    """Print the versions of an engine's packages, or the answers to a job, and why it refuses it (ValueError) behind them.

    The command line is --versions or a job's file. packages: the first is the engine's own; answer: of what load has loaded, a
    request and a number of repeats. All that the engine prints goes to the standard error: the standard output is for answers.
    """
    (asked,) = sys.argv[1:]
    if asked == "--versions":
        names = metadata.packages_distributions()
        if packages[0] not in names:
            sys.exit(f"{sys.executable}: {packages[0]} is not installed here")
        print(json.dumps({name: metadata.version(names[name][0]) for name in packages}))
        return
    out = os.dup(1)
    os.dup2(2, 1)
    job = read_job(Path(asked))
    with os.fdopen(out, "w", encoding="utf-8") as answers:
        try:
            loaded = _loaded(load, job)
            answer(loaded, job.requests[0], 1)  # its first times are those of a cold start
            for request in job.requests:
                answers.write(json.dumps(asdict(answer(loaded, request, job.repeats))) + "\n")
                answers.flush()
        except ValueError as error:
            answers.write(json.dumps({REFUSED: str(error)}) + "\n")
            sys.exit(f"error: {error}")


def _loaded(load: Callable[[Job], Any], job: Job) -> Any:
    """Load a job. Raises ValueError for whatever an engine raises as it starts, but for a lack of memory or disk."""
    try:
        return load(job)
    except (ValueError, MemoryError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"does not load {job.files}: {type(error).__name__}: {error}") from None
