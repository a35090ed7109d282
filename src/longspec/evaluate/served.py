"""A drafter measured through vLLM: the target and its draft as folders, vLLM in an environment of its own."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig

import longspec
from longspec.distributed import die_with_parent
from longspec.draft.folder import draft_config, write_draft
from longspec.draft_vocabulary import DraftVocabulary
from longspec.evaluate.served_lines import Ask
from longspec.evaluate.tasks import ROOM, check_interpreter
from longspec.families import position_limit
from longspec.methods import method_of, vllm_method
from longspec.models.target import load_target, read_target_config
from longspec.serve.protocol import Answer, Job, Request, answer_of
from longspec.shown import brief
from longspec.states.forward import TargetStates

NGRAM = "ngram"  # vLLM's own prompt lookup
SILENT = 3600.0  # seconds: a target of hundreds of GB is loaded in less, and a text decoded
MEND = "its own messages stand above; install the vLLM of serve-requirements.txt, by `make .venv-serve/.stamp`"


@dataclass(frozen=True)
class ServedTarget:
    """Facts about a target that another process holds, under the names that a loaded one has."""

    path: str
    config: Any
    generation_config: Any
    dtype: torch.dtype
    device: torch.device


def served_target(path: str, dtype: torch.dtype, device: torch.device) -> ServedTarget:
    """The facts of a target's folder."""
    config, own = read_target_config(path), Path(path) / "generation_config.json"
    told = GenerationConfig.from_pretrained(path) if own.is_file() else GenerationConfig.from_model_config(config)
    return ServedTarget(path, config, told, dtype, device)


@dataclass(frozen=True)
class Drafted:
    """A kind of draft by vLLM's name of it, and the folder of its weights where it has some."""

    method: str
    folder: Path | None = None


def trained_draft(folder: Path, target: ServedTarget, recipe: Any, vocabulary: DraftVocabulary | None) -> Drafted:
    """A stage's draft. Raises ValueError where it is damaged or not of this recipe and target: vLLM itself asks little."""
    method, settings = method_of(recipe, vocabulary)
    served = vllm_method(method.name)
    method.check_same(folder, target.config, settings)
    method.load(method.layer(target.config, settings), folder)
    return Drafted(served, folder)


@contextmanager
def fresh_draft(target: ServedTarget, recipe: Any, vocabulary: DraftVocabulary | None) -> Iterator[Drafted]:
    """A draft of fresh weights of the recipe's seed, in a folder that is gone behind the block."""
    served = vllm_method(recipe.method.name)
    with TemporaryDirectory() as folder:
        _write_fresh(Path(folder) / "draft", target, recipe, vocabulary)
        yield Drafted(served, Path(folder) / "draft")


def _write_fresh(folder: Path, target: ServedTarget, recipe: Any, vocabulary: DraftVocabulary | None) -> None:
    """Such a draft's folder. The target that lends it norm and head is gone from memory afterwards: vLLM loads its own."""
    method, settings = method_of(recipe, vocabulary)
    states = TargetStates(load_target(target.path, target.config, target.dtype))
    torch.manual_seed(recipe.seed)
    weights = method.published(method.fresh_layer(states, settings).state_dict(), settings)
    write_draft(folder, weights, draft_config(target.path, recipe, vocabulary))


def asking(python: str, target: ServedTarget, drafted: Drafted, repeats: int) -> Ask:
    """Has vLLM answer requests: with this draft, or without."""
    limit = position_limit(target.config)

    def ask(tokens: int | None, requests: list[Request]) -> Iterator[Answer]:
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        method, folder = (None, None) if tokens is None else (drafted.method, drafted.folder)
        job = Job(
            model=target.path,
            method=method,
            draft=None if folder is None else str(folder),
            tokens=tokens or 0,
            dtype=str(target.dtype).removeprefix("torch."),
            positions=min(limit, longest + ROOM),
            repeats=repeats,
            requests=requests,
        )
        return answers(python, job, target.config.get_text_config().vocab_size)

    return ask


def versions(python: str) -> dict[str, str]:
    """The versions of vLLM, torch and transformers beside an interpreter. Raises ValueError where it has no vLLM."""
    check_interpreter(python)
    with _environment() as environment:
        command = [python, "-m", "longspec.serve", "--versions"]
        try:
            done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
        except OSError as error:
            raise _without_vllm(f"{python}: {error.strerror}") from error
    if done.returncode:
        raise _without_vllm((done.stderr.strip().splitlines() or [f"{python}: exit code {done.returncode}"])[-1])
    try:
        found: dict[str, str] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise _without_vllm(f"{python}: is no Python with vLLM: it answers {done.stdout[:80]!r}") from error
    return found


def _without_vllm(told: str) -> ValueError:
    """The error of an interpreter that cannot run vLLM, with the way to one that can."""
    told = told.removeprefix("error: ")
    return ValueError(f"evaluation.serve_python: {told}; `make .venv-serve/.stamp` makes an environment with vLLM")


def answers(python: str, job: Job, vocabulary: int) -> Iterator[Answer]:
    """Yield an answer to each request of a job, in their order, as soon as vLLM has it.

    Raises ValueError when the process ends before all are there, says nothing for SILENT seconds, or writes what is no answer;
    what it and vLLM print stands on the standard error.
    """
    where = f"{python} -m longspec.serve"
    with TemporaryDirectory() as folder, _environment() as environment:
        path = Path(folder) / "job.json"
        job.write(path)
        command = [python, "-m", "longspec.serve", str(path)]
        # It dies with this process: a signal between its start and the block below would leave it behind.
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
        try:
            assert process.stdout is not None
            done = 0
            for request, line in zip(job.requests, _lines(process.stdout.fileno(), where), strict=False):
                try:
                    answer = answer_of(json.loads(line), vocabulary)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: wrote no answer to {request.id!r}: {brief(error)}; {MEND}") from None
                if answer.id != request.id or len(answer.tokens) > request.max_tokens:
                    told = f"{len(answer.tokens)} tokens for {answer.id!r}"
                    raise ValueError(
                        f"{where}: answered with {told}, where {request.max_tokens} for {request.id!r} were asked; {MEND}"
                    )
                done += 1
                yield answer
            code = process.wait(SILENT)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{where}: does not end {SILENT:.0f} s after its last answer; {MEND}") from None
        finally:
            process.kill()
            process.wait()
    if code or done < len(job.requests):
        raise ValueError(f"{where} ended with exit code {code}; vLLM's own message stands above")


def _lines(pipe: int, where: str) -> Iterator[bytes]:
    """Yield whole lines; what its end has torn is none. Raise ValueError where nothing comes for SILENT seconds."""
    held = b""
    while True:
        if not select.select([pipe], [], [], SILENT)[0]:
            raise ValueError(f"{where}: vLLM has written nothing for {SILENT:.0f} s; {MEND}")
        if not (more := os.read(pipe, 2**16)):
            return
        *whole, held = (held + more).split(b"\n")
        yield from whole


@contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Variables with which another environment finds this package, and nothing else that is installed beside it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "longspec").symlink_to(Path(longspec.__file__).parent)
        yield os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
