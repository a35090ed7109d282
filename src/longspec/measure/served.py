"""An engine in an environment of its own, such as vLLM: the target and a draft as folders, a process that answers requests."""

import json
import os
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
from longspec import methods
from longspec.config.names import LOOKUP, UNTRAINED
from longspec.distributed import die_with_parent
from longspec.draft.folder import draft_config, write_draft
from longspec.draft.layouts import write_layout
from longspec.draft_vocabulary import DraftVocabulary
from longspec.families import position_limit
from longspec.measure.engines.protocol import Answer, Job, Request
from longspec.measure.tasks import ROOM, check_interpreter
from longspec.methods import method_of, vllm_method
from longspec.models.target import load_target, read_target_config
from longspec.states.forward import TargetStates

NGRAM = "ngram"  # vLLM's own prompt lookup
PROGRAM = ["-m", "longspec.measure.engines.vllm"]


@dataclass(frozen=True)
class ServedTarget:
    """Facts about a target that another process holds, under the names that a loaded one has."""

    path: str
    config: Any
    generation_config: Any
    dtype: torch.dtype
    device: torch.device


def served_target(path: str, dtype: torch.dtype, device: torch.device) -> ServedTarget:
    """Read the facts of a target's folder."""
    config, own = read_target_config(path), Path(path) / "generation_config.json"
    told = GenerationConfig.from_pretrained(path) if own.is_file() else GenerationConfig.from_model_config(config)
    return ServedTarget(path, config, told, dtype, device)


@contextmanager
def served_draft(
    drafter: str, folder: Path | None, target: ServedTarget, recipe: Any, vocabulary: DraftVocabulary | None
) -> Iterator[tuple[str, Path | None]]:
    """Yield vLLM's name of the kind of draft and the folder of its weights, if any; a fresh one's is gone behind the block.

    folder: a stage's draft. Raises ValueError where it is damaged or not of this recipe and target: vLLM itself asks little.
    """
    if drafter == LOOKUP:
        yield NGRAM, None
        return
    served = vllm_method(recipe.method.name)
    method, settings = method_of(recipe, vocabulary)
    with TemporaryDirectory() as place:
        if drafter == UNTRAINED:
            folder = Path(place) / "draft"
            _write_fresh(folder, target, recipe, vocabulary)
        else:
            assert folder is not None
            method.load(method.layer(target.config, settings), folder, target.config, settings)
        loaded = methods.vllm_folder(recipe.method.name, folder)
        if loaded != folder:
            loaded = Path(place) / loaded.name
            write_layout(folder, loaded.name, loaded)
        yield served, loaded


def _write_fresh(folder: Path, target: ServedTarget, recipe: Any, vocabulary: DraftVocabulary | None) -> None:
    """Write a draft of fresh weights of the recipe's seed.

    The target that lends it norm and head is gone from memory afterwards: vLLM loads its own.
    """
    method, settings = method_of(recipe, vocabulary)
    states = TargetStates(load_target(target.path, target.config, target.dtype))
    torch.manual_seed(recipe.seed)
    weights = method.published(method.trainer(states, settings, None).draft_model.state_dict(), settings)
    write_draft(folder, weights, draft_config(target.path, recipe, vocabulary))


def versions(python: str) -> dict[str, str]:
    """Return the versions of vLLM, torch and transformers beside an interpreter. Raises ValueError where it has no vLLM."""
    check_interpreter(python)
    with _environment() as environment:
        done = subprocess.run([python, *PROGRAM, "--versions"], env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"{python}: exit code {done.returncode}"])[-1]
        raise ValueError(f"evaluation.serve_python: {why}; `make .venv-serve/.stamp` makes an environment with vLLM")
    found: dict[str, str] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Engine:
    """Has vLLM answer requests by a draft, or without.

    python: the interpreter of its environment; method, folder: as of served_draft; repeats: how often each request is decoded.
    """

    python: str
    target: ServedTarget
    method: str
    folder: Path | None
    repeats: int

    def ask(self, tokens: int | None, requests: list[Request]) -> Iterator[Answer]:
        """Yield an answer to each request as soon as vLLM has it; tokens: drafted ones of a round, None without draft.

        Raises ValueError when the process ends before all are there; what it and vLLM print stands on the standard error.
        """
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        job = Job(
            model=self.target.path,
            method=None if tokens is None else self.method,
            draft=None if tokens is None or self.folder is None else str(self.folder),
            tokens=tokens or 0,
            dtype=str(self.target.dtype).removeprefix("torch."),
            positions=min(position_limit(self.target.config), longest + ROOM),
            repeats=self.repeats,
            requests=requests,
        )
        with TemporaryDirectory() as place, _environment() as environment:
            path = Path(place) / "job.json"
            job.write(path)
            # It dies with this process: a signal between its start and the block below would leave it behind.
            process = subprocess.Popen(
                [self.python, *PROGRAM, str(path)],
                env=environment,
                stdout=subprocess.PIPE,
                preexec_fn=die_with_parent,
            )
            assert process.stdout is not None
            done = 0
            try:
                for line in process.stdout:
                    if line.endswith(b"\n"):  # else its end has torn it
                        yield Answer(**json.loads(line))
                        done += 1
                code = process.wait()
            finally:
                process.kill()
                process.wait()
        if code or done < len(requests):
            raise ValueError(f"{self.python} {' '.join(PROGRAM)} ended with exit code {code}; its own message stands above")


@contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Yield variables with which another environment finds this package, and nothing else that is installed beside it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "longspec").symlink_to(Path(longspec.__file__).parent)
        yield os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
