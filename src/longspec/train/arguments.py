"""Read the trainer's two kinds of arguments: frozen files, or a Hydra experiment by name, which is frozen first."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from longspec.atomic_files import write_text
from longspec.config import Recipe, Runtime, compose, load, to_yaml
from longspec.distributed import Ranks, log
from longspec.shown import named_path
from longspec.slurm import PAUSE, ask_patiently, own_job, squeue

USAGE = """%(prog)s --recipe FILE --runtime FILE --target FILE --data FILE --out DIR ...
       %(prog)s -cp DIR -cn NAME [KEY=VALUE ...]
       %(prog)s plan --help    will it fit, and how long will it take?"""
DESCRIPTION = (
    "Train one stage of a draft. Into its folder go checkpoints/, status.json and metrics.jsonl, and with the last step "
    "checkpoint.json; an experiment is first frozen there. A killed job is started again by the same command and goes on from "
    "its last checkpoint."
)
RECIPE, RUNTIME = "recipe.yaml", "runtime.yaml"
PATHS = ("target", "out", "init_weights", "vocabulary")  # fields of a Job
LISTS = ("data", "states")  # fields that are lists of paths
SLURM, NO_LIMIT = "slurm", ("N/A", "NONE", "Unknown", "UNLIMITED")  # squeue's words for no end of a job


@dataclass
class Job:
    """Hold the arguments of one training job. For an experiment by name, recipe and runtime are those of its frozen files."""

    recipe: Any
    runtime: Any
    target: Path
    data: Sequence[Path]  # one for each of its data sets, in the order of their names
    init_weights: Path | None
    out: Path
    deadline: float | None = None  # seconds since 1970
    vocabulary: Path | None = None
    states: Sequence[Path] = ()  # of all these rows and the held-out ones, in any order
    replay: Mapping[str, Path] = field(default_factory=dict)  # stage -> packed rows, for recipe.data.replay
    by_name: bool = False  # composed, but not yet written to its folder


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m longspec.train`."""
    parser = argparse.ArgumentParser(prog="python -m longspec.train", usage=USAGE, description=DESCRIPTION)
    frozen = parser.add_argument_group("from frozen files, as the workflow starts it")
    for name, purpose in (
        ("--recipe", "recipe.yaml: what decides the weights"),
        ("--runtime", "runtime.yaml: what does not"),
        ("--target", "target_manifest.json"),
        ("--init-weights", "draft weights or a draft folder to begin with; default: fresh"),
        ("--vocabulary", "draft_vocabulary_{size}.json, where the recipe wants one"),
    ):
        frozen.add_argument(name, type=Path, metavar="FILE", help=purpose)
    for name, purpose in (
        ("--data", "manifest.json of the packed rows; of a mix those of each data set, in the order of their names"),
        ("--states", "shard.json of all stored states, where the recipe wants them, in any order"),
    ):
        frozen.add_argument(name, type=Path, nargs="+", default=[], metavar="FILE", help=purpose)
    replay = "packed rows of each stage that recipe.data.replay names"
    frozen.add_argument("--replay", type=named_path, nargs="+", default=[], metavar="STAGE=MANIFEST", help=replay)
    frozen.add_argument("--out", type=Path, metavar="DIR", help="the stage's folder")
    deadline = "save and stop by then: seconds since 1970, or `slurm`"
    parser.add_argument("--deadline", metavar="TIME", help=deadline)
    named = parser.add_argument_group("by experiment name, by hand")
    named.add_argument("-cp", "--config-path", type=Path, metavar="DIR", help="folder of the experiment, e.g. config/exp")
    named.add_argument("-cn", "--config-name", metavar="NAME", help="experiment: a file's name in that folder")
    named.add_argument("--cfg", choices=["job"], help="print the experiment's whole configuration and end")
    named.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, e.g. files.target=... recipe.seed=1")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # added by the `deepspeed` launcher, which also sets LOCAL_RANK
    return parser


def read_job(argv: list[str] | None, ranks: Ranks) -> Job:
    """Return the job of the command line. Raises SystemExit after `--cfg job`, ValueError for arguments that do not fit."""
    options = parser().parse_intermixed_args(argv)  # like Hydra, allows overrides anywhere
    options.deadline = read_deadline(options.deadline, ranks)
    if options.config_name:
        return _job_by_name(options, ranks)
    if options.cfg:
        raise ValueError("--cfg: shows an experiment; name it: -cp config/exp -cn NAME")
    missing = [f"--{name}" for name in ("recipe", "runtime", "target", "data", "out") if not getattr(options, name)]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; or name an experiment: -cp config/exp -cn NAME")
    if options.overrides:
        raise ValueError(f"{' '.join(options.overrides)}: overrides go with -cn; frozen files are not overridden")
    recipe, runtime = load(options.recipe, Recipe), load(options.runtime, Runtime)
    given: dict[str, Any] = {name: getattr(options, name) for name in (*PATHS, *LISTS)} | {"replay": dict(options.replay)}
    return _checked(Job(recipe, runtime, deadline=options.deadline, **given))


def _checked(job: Job) -> Job:
    """Return the job. Raises ValueError if the weights to begin with do not exist, or recipe.init needs some."""
    if job.init_weights is not None and not job.init_weights.exists():
        raise ValueError(
            f"{job.init_weights}: no such draft to begin with (--init-weights, files.init_weights=); train the stage before "
            "this one with runtime.extract_at_end=true, or make its draft by python -m longspec.draft extract"
        )
    if job.recipe.init is not None and job.init_weights is None:
        raise ValueError(
            f"recipe.init: {job.recipe.init}: no weights to begin with; import it by python -m longspec.draft import, and give "
            "the folder by --init-weights, or by files.init_weights= where an experiment is named"
        )
    return job


def read_deadline(text: str | None, ranks: Ranks, pause: float = PAUSE) -> float | None:
    """Return seconds since 1970. Only rank 0 asks Slurm: the ranks agree on stopping, so it is enough if one knows.

    None outside a Slurm job, in a job without a time limit, and if squeue does not answer: then the job trains until Slurm ends
    it, and loses what it did after its last checkpoint.
    """
    job = own_job()
    if text is None or (text == SLURM and (job is None or not ranks.is_main)):
        return None
    if text != SLURM:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"--deadline: {text!r} is neither seconds since 1970 nor '{SLURM}'") from None

    def told() -> datetime | None:
        answer = squeue("--jobs", str(job), "--format", "%e").strip()
        return None if answer in NO_LIMIT else datetime.fromisoformat(answer)  # in this machine's time zone

    try:
        end = ask_patiently(told, pause)  # a busy squeue may print nothing and still succeed
    except ValueError as error:
        log(f"squeue does not tell the end of Slurm job {job}, so it is not stopped before: {error}")
        return None
    if end is None:
        return None
    log(f"Slurm job {job} ends at {end:%H:%M:%S on %d %B}; the stage saves and stops before")
    return end.timestamp()


def _job_by_name(options: argparse.Namespace, ranks: Ranks) -> Job:
    """Return the job of an experiment. Raises SystemExit after `--cfg job`, ValueError if a file is not given."""
    if options.config_path is None:
        raise ValueError("-cn needs -cp, the folder of the experiment, e.g. -cp config/exp")
    config = compose(options.config_name, options.overrides, options.config_path)
    if options.cfg:
        if ranks.is_main:
            print(OmegaConf.to_yaml(config, resolve=True), end="")
        raise SystemExit(0)
    files = config.files
    unset = [f"files.{name}=..." for name in ("target", "data", "out") if OmegaConf.is_missing(files, name)]
    if unset:
        raise ValueError(f"{options.config_name}: give {' '.join(unset)}")
    given: dict[str, Any] = {name: None if files[name] is None else Path(files[name]) for name in PATHS}
    for name in LISTS:
        paths = [files[name]] if isinstance(files[name], str) else files[name] or []
        given[name] = [Path(path) for path in paths]
    given["replay"] = {name: Path(path) for name, path in files.replay.items()}
    # Every rank composes the same text, so none has to wait for rank 0's file.
    return _checked(Job(config.recipe, config.runtime, deadline=options.deadline, by_name=True, **given))


def freeze(job: Job) -> None:
    """Write recipe and runtime of an experiment by name to its folder, which this process must hold."""
    if job.by_name:
        write_text(job.out / RECIPE, to_yaml(job.recipe))
        write_text(job.out / RUNTIME, to_yaml(job.runtime))
        log(f"frozen: {job.out / RECIPE}, {job.out / RUNTIME}")
