"""Exchange data between an evaluation and an engine's environment: a job in, one line of answer for each request out.

An engine is a module here, which the Python of its environment runs as a program. Standard library only, since both import it.
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

REFUSED = "refused"  # field of a line that replaces the answers: why the engine gives none


@dataclass(frozen=True)
class Request:
    """Hold one text to decode. Temperature 0 is greedy; stop: tokens that end the text, which keeps them.

    best: the number of likeliest tokens to return at each place of the text, with their logits.
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
    """Hold a model and its requests. method: the engine's name for the kind of draft, None: no draft; tokens: of each draft.

    draft: the folder of its weights, None for kinds without any; positions: of the longest text with its drafts; repeats: how
    often each request is decoded; scratch: a folder for files that an engine makes, which its next start finds again.
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
        """Return the paths of what is loaded, for error messages."""
        return " and ".join(filter(None, (self.model, self.draft)))


def read_job(path: Path) -> Job:
    """Read a job's file: its fields as JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Job(**content | {"requests": [Request(**request) for request in content["requests"]]})


@dataclass(frozen=True)
class Answer:
    """Hold one decoded text, as the engine reports it.

    tokens: the text; accepted: drafted tokens kept in each round, the last round's not cut at the end of the text; best: at
    each place (token, logit) of the likeliest tokens, best first; seconds: from the first token to the end, for each repeat.
    """

    id: str
    tokens: list[int]
    accepted: list[int]
    seconds: list[float]
    best: list[list[tuple[int, float]]] = field(default_factory=list)


def within(kept: list[int], length: int) -> list[int]:
    """Return the kept drafts of the rounds that begin within a text of this length; the last round is not cut."""
    return [count for number, count in enumerate(kept) if 1 + number + sum(kept[:number]) < length]


def cut(text: list[int], request: Request) -> list[int]:
    """Return a text up to the token that ends it, at most request.max_tokens long."""
    ends = (place for place, token in enumerate(text[: request.max_tokens], start=1) if token in request.stop)
    return text[: next(ends, request.max_tokens)]


def run(packages: tuple[str, ...], load: Callable[[Job], Any], answer: Callable[[Any, Request, int], Answer]) -> None:
    """Print the versions of an engine's packages, or an answer for each request of a job; last, if it refuses, a line why.

    The command line is --versions or a job's file. packages: the engine's own first; load: job -> loaded model; answer: takes
    it, a request and the number of repeats. ValueError is a refusal. The engine's own prints go to standard error.
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
            answer(loaded, job.requests[0], 1)  # warm-up: the first times are slow
            for request in job.requests:
                answers.write(json.dumps(asdict(answer(loaded, request, job.repeats))) + "\n")
                answers.flush()
        except ValueError as error:
            answers.write(json.dumps({REFUSED: str(error)}) + "\n")
            sys.exit(f"error: {error}")


def _loaded(load: Callable[[Job], Any], job: Job) -> Any:
    """Load a job. Raises ValueError for any error at an engine's start; MemoryError and OSError pass unchanged."""
    try:
        return load(job)
    except (ValueError, MemoryError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"does not load {job.files}: {type(error).__name__}: {error}") from None
