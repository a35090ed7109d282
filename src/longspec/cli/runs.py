"""`longspec plan`, `train` and `report`: a run from its file to its draft, by Snakemake."""

import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longspec import methods
from longspec.cluster import stages
from longspec.cluster.resume import SNAKEMAKE
from longspec.config import compose_stage, differences, plain, yaml_files
from longspec.config.run_file import CONFIG_DIR, default_method, name_of, read_run
from longspec.engines import VLLM
from longspec.report import ending
from longspec.shown import duration
from longspec.workflow.checks import checked_plan
from longspec.workflow.plan import Plan
from longspec.workflow.settings import datasets

EVERY = 30.0  # seconds between two looks at the stages that train


def _chosen(options: Namespace) -> list[str]:
    """Return Snakemake's arguments; it takes the last --config alone, so that all of yours become one, with the run."""
    settings = ArgumentParser(add_help=False, allow_abbrev=False)
    settings.add_argument("--config", "-C", nargs="*", action="extend", default=[])
    given, others = settings.parse_known_args(options.snakemake)
    return ["final_draft", *others, "--config", f"run={options.run}", *given.config]


def snakemake(*arguments: str, look: Callable[[], None] = lambda: None) -> int:
    """Run Snakemake and return its exit code. look: what is done each EVERY seconds meanwhile. Ctrl-C ends Snakemake first."""
    process, code = subprocess.Popen([*SNAKEMAKE, *arguments]), None
    try:
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(EVERY)
            if code is None:
                look()
    except KeyboardInterrupt:  # the terminal has told Snakemake too
        while process.poll() is None:
            with suppress(KeyboardInterrupt):
                process.wait()
        print("the same command goes on")
        raise
    return code


def plan_of(run: str) -> Plan:
    """Return the checked plan of a run, as the Snakefile makes it."""
    return checked_plan(yaml_files.read(Path(datasets.FILE)) | {"run": run})


def plan(options: Namespace) -> int:
    """Say in some lines what would run: which stages train, and by which keys they differ from what is there."""
    done = subprocess.run([*SNAKEMAKE, "--summary", *_chosen(options)], capture_output=True, text=True)
    if done.returncode:
        print("\n".join(line for line in done.stderr.splitlines() if not line.startswith(("Using", "Config file"))))
        return done.returncode
    files = [line.split("\t") for line in done.stdout.splitlines()]  # a line a file: name, date, rule, log, status, plan
    made = {name: rule for name, _, rule, *_, planned in files if planned == "update pending"}
    if not made:
        print("nothing to be done: all files are there and up to date")
        return 0
    trained = [Path(name).parent for name, rule in made.items() if rule == "train"]
    run = read_run(options.run, [CONFIG_DIR])
    for variant in dict.fromkeys(folder.parent for folder in trained):
        for stage in run.says.stages:
            folder = variant / stage
            print(_stage(options.run, folder) if folder in trained else f"{folder}: stays as it is")
    if not trained:
        print("no stage is trained: all drafts stay as they are")
    method = run.says.method or default_method()
    if VLLM not in methods.settings_of(method).SERVED:
        print(f"no engine loads {method} drafts; transformers' generate and ours do (docs/generate.md)")
    print(f"{len(made)} files are made, by the rules {', '.join(dict.fromkeys(made.values()))}")
    return 0


def _stage(run: str, folder: Path) -> str:
    """Say of a stage that is to be trained what has changed since its recipe was frozen, its steps, and their time if known."""
    recipe = compose_stage(run, folder.parent.name, folder.name).recipe
    frozen, cost = folder / "recipe.yaml", _cost(folder, recipe.steps)
    if not frozen.is_file():
        return f"{folder}: is trained{cost}"
    changed = differences(yaml_files.read(frozen), plain(recipe))
    if changed:
        return f"{folder}: is trained again: {'; '.join(changed)}{cost}"
    if (folder / "checkpoints").is_dir():
        return f"{folder}: goes on{cost}"
    return f"{folder}: is trained: what it begins with has changed{cost}"


def _cost(folder: Path, steps: int | None) -> str:
    """Return the number of steps of a stage that is to be trained, and their time as far as an earlier training tells it."""
    before = stages.read(folder, folder.name, folder.parent) if (folder / "recipe.yaml").is_file() else None
    number, pace = (steps, None) if before is None else (steps or before.total, before.middle("seconds"))
    if number is None:
        return ""
    return f"; {number} steps" + (f", about {duration(number * pace)}" if pace is not None else "")


def train(options: Namespace) -> int:
    """Make a run's final draft, and say what came out."""
    results, steps = Path("results") / name_of(options.run), dict[str, int]()

    def look() -> None:
        with suppress(OSError, ValueError):  # of folders that change meanwhile; the run itself goes on
            for line in progress(results, steps):
                print(line, flush=True)

    code = snakemake(*_chosen(options), look=look)
    return report(options) if not code and (results / "report.json").is_file() else code  # none after -n, --unlock, --until


def progress(results: Path, told: dict[str, int]) -> list[str]:
    """Return a line for each stage below a run's folder that has come further. told: by stage its step; updated."""
    found = []
    for stage in stages.find(results):
        if stage.state != "running" or stage.step == told.get(stage.name):
            continue
        told[stage.name] = stage.step
        pace, seconds = stage.middle("tokens_per_second"), stage.seconds_left
        speed = f", {pace:,.0f} tokens/s" if pace else ""
        left = f", {duration(seconds)} left" if seconds is not None else ""
        found.append(f"{results.name}/{stage.name}: step {stage.step} of {stage.total or '?'}{speed}{left}")
    return found


def report(options: Namespace) -> int:
    """Print what a finished run says. Raises ValueError where there is no report yet."""
    name = name_of(options.run)
    told = ending.lines(name, options.run)
    if not told:
        raise ValueError(f"results/{name}/report.json: no such file; make it first: longspec train {options.run}")
    print("\n".join(told))
    return 0
