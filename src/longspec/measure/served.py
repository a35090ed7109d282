"""Evaluate with an engine in its own environment: a process answers requests (engine_files.py: what it loads).

The engine's counters turn its answers into lines like those of measurer.py.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Any

import torch

import longspec
from longspec.atomic_files import sha256_text
from longspec.decode.autoregressive import near_tie_margin
from longspec.decode.texts import LENGTH, STOP, Row
from longspec.distributed import die_with_parent
from longspec.engines import Engine
from longspec.families import position_limit
from longspec.journal import Journal
from longspec.measure.engines.protocol import REFUSED, Answer, Job, Request
from longspec.measure.lines import Gap, Line, Work, key_of, key_text, verdict_of
from longspec.measure.measurer import line_of
from longspec.measure.tasks import ROOM, Prompt, Setting, check_interpreter
from longspec.shown import brief

# Two float32 logits closer than this are a tie: kernels sum in another order for one token than for several.
TIE_FLOAT32 = 1e-4
BEST = 8  # tokens whose logits an engine returns at each place of the text without draft
# Errors of engines that another try may avoid, so they are no refusals.
LACKS = re.compile(
    r"out of memory|(?:cannot|can't|failed to|unable to) allocate|bad_alloc|MemoryError|no space left|quota exceeded"
    r"|free memory on device|no available memory",  # vLLM's, beside another process on the same GPU
    re.I,
)
PLAIN = "plain"  # field of a journal's line that holds an answer without draft


class RefusedError(ValueError):
    """Report that an engine refuses to load or answer what it is given; it would refuse again."""


@contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Yield variables that let another environment import this package, but no other package installed next to it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "longspec").symlink_to(Path(longspec.__file__).parent)
        yield os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}


def _program(engine: Engine) -> list[str]:
    """Return the arguments with which Python runs an engine."""
    return ["-m", f"longspec.measure.engines.{engine.name.replace('.', '_')}"]


def versions(engine: Engine, python: str) -> dict[str, str]:
    """Return the versions of an engine's packages in an interpreter's environment. Raises ValueError if it has none."""
    check_interpreter(python, engine)
    with _environment() as environment:
        words = [python, *_program(engine), "--versions"]
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"{python}: exit code {done.returncode}"])[-1]
        raise RefusedError(f"evaluation.serve_python: {why}; {engine.install} makes an environment with {engine.title}")
    return json.loads(done.stdout)


@dataclass(frozen=True)
class ServedMeasurer:
    """Measure a served drafter: an engine answers the requests with it, and without.

    python: the interpreter of the engine's environment; files: fields of a Job, as engine_files.loaded yields them; repeats:
    how often each request is decoded; eos: tokens that end a text; seed: of all random draws.
    """

    engine: Engine
    python: str
    target: Any
    files: dict[str, Any]
    eos: list[int]
    tokenizer: Any
    repeats: int
    seed: int

    def ask(self, tokens: int | None, requests: list[Request]) -> Iterator[Answer]:
        """Yield each answer as soon as the engine has it. tokens: drafted in each round, None: without draft.

        Raises RefusedError if the engine refuses or its process aborts, ValueError if the process ends otherwise before all
        answers are there. The engine prints to standard error.
        """
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        job = Job(
            **self.files | ({"method": None, "draft": None} if tokens is None else {}),
            tokens=tokens or 0,
            dtype=str(self.target.dtype).removeprefix("torch."),
            positions=min(position_limit(self.target.config), longest + ROOM),
            repeats=self.repeats,
            requests=requests,
        )
        with _environment() as environment:
            path = Path(environment["PYTHONPATH"]) / "job.json"
            path.write_text(json.dumps(asdict(job)), encoding="utf-8")
            words, done, told = [self.python, *_program(self.engine)], 0, None
            # The engine dies with this process: a signal between its start and the block below would leave it running.
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "preexec_fn": die_with_parent}
            process = subprocess.Popen([*words, str(path)], env=environment, **pipes)
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    content = json.loads(line) if line.endswith(b"\n") else {}  # the process ended within this line
                    if REFUSED in content:
                        told = content[REFUSED]
                    elif content:
                        yield Answer(**content)
                        done += 1
                code = process.wait()
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
        if told and LACKS.search(told):
            raise ValueError(f"evaluation.engine: {self.engine.name}: {brief(told)}")
        if told or code == -signal.SIGABRT:
            why = told or "aborts; the log has its own words"
            raise RefusedError(brief(why if why.startswith("evaluation.") else f"evaluation.engine: {self.engine.name}: {why}"))
        if code or done < len(requests):
            raise ValueError(f"{' '.join(words)} ended with exit code {code}; its own message stands above")

    def lines(self, work: Work, journal: Journal) -> dict[str, Line]:
        """Return a line for each prompt and setting, by its key; the journal gets each line and each plain text at once.

        The engine is started once without draft, then once for each number of drafted tokens. Raises ValueError if greedy text
        with drafts differs from the text without.
        """
        plain, found = self._plain(work, journal), {}
        for tokens in dict.fromkeys(setting.shape for _, setting in work.values()):
            assert isinstance(tokens, int), "measure.tasks refuses trees"
            items = {key: item for key, item in work.items() if item[1].shape == tokens}
            for answer in self.ask(tokens, [self._request(key, *item, best=0) for key, item in items.items()]):
                item = items[answer.id]
                found[answer.id] = self.line(*item, plain[key_text(key_of(*item, drafted=False))], answer)
                journal.append(found[answer.id])
        return found

    def _plain(self, work: Work, journal: Journal) -> dict[str, Answer]:
        """Return the texts without draft, by key: those of the journal, and the others decoded now."""
        known = {key_text(line): Answer(**line[PLAIN]) for line in journal.lines or [] if PLAIN in line}
        keyed = {key_text(key_of(*item, drafted=False)): item for item in work.values()}
        missing = {key: item for key, item in keyed.items() if key not in known}
        requests = [self._request(key, *item, best=BEST) for key, item in missing.items()]
        for answer in self.ask(None, requests) if requests else ():
            known[answer.id] = answer
            journal.append({**key_of(*missing[answer.id], drafted=False), PLAIN: asdict(answer)})
        return known

    def _request(self, key: str, prompt: Prompt, setting: Setting, best: int) -> Request:
        seed = int(sha256_text(f"{self.seed} {key}")[:15], 16)
        told = best if setting.temperature == 0 else 0
        # The prompt's forward yields one token more than was asked for, as in measurer.py.
        return Request(key, prompt.ids, prompt.new_tokens + 1, setting.temperature, seed, self.eos, told)

    def line(self, prompt: Prompt, setting: Setting, plain: Answer, answer: Answer) -> Line:
        """Return a line with the fields of measurer.py; engines report no separate seconds of draft and target: None."""
        assert isinstance(setting.shape, int)
        row = Row(answer.tokens, answer.accepted, LENGTH)
        if answer.tokens[-1] in self.eos:  # as in decode.speculate, tokens kept after the end of the text do not count
            behind = 1 + row.new_tokens - len(row.ids)
            row = Row(row.ids, [*row.accepted[:-1], *(kept - behind for kept in row.accepted[-1:])], STOP)
        verdict = verdict_of(prompt, setting, plain.tokens, answer.tokens, gap_of(plain, self.target.dtype))
        plain_seconds = median_low(plain.seconds) / max(1, len(plain.tokens) - 1)
        seconds = (median_low(answer.seconds), None, None)
        return line_of(self.tokenizer, prompt, setting, row, verdict, plain_seconds, seconds) | {"engine": self.engine.name}


def gap_of(plain: Answer, dtype: torch.dtype) -> Gap:
    """Return a function: the distance of two logits of the text without draft, and that of a near-tie.

    A near-tie: in float32 within TIE_FLOAT32; in half precision within four roundings of the dtype at the size of the largest
    logit, since engines round logits to it (decode.autoregressive.near_tie_margin). The largest is taken among the likeliest
    tokens, by magnitude, but among all tokens in measurer.gap_of. So this allows less than measurer.gap_of where an unlikely
    token's logit, far below 0, is the largest.
    """

    def gap(place: int, own: int, other: int) -> tuple[float, float]:
        logits = dict(plain.best[place])
        values = list(logits.values())
        allowed = TIE_FLOAT32 if dtype == torch.float32 else near_tie_margin(torch.tensor(values, dtype=dtype))
        if len(values) == 1:  # llama.cpp gives no other token within a character: taken for a tie, as nearly all are
            return 0.0, allowed
        # A token that is not among the likeliest is only known to lie below all of them.
        margin = logits[own] - logits[other] if other in logits else max(logits[own] - min(values), 2 * allowed)
        return margin, allowed

    return gap
