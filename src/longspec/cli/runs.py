"""`longspec plan`, `train` and `report`: a run from its file to its draft, by Snakemake."""

import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import join

from longspec import methods
from longspec.cluster import stages
from longspec.cluster.resume import SNAKEMAKE
from longspec.config import compose_stage, differences, plain, yaml_files
from longspec.config.run_file import CONFIG_DIR, default_method, name_of, read_run
from longspec.engines import VLLM
from longspec.report import ending
from longspec.shown import duration
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS
from longspec.workflow.checks import checked_plan
from longspec.workflow.plan import Plan
from longspec.workflow.settings import datasets

MAKES_NOTHING = {"-n", "--dry-run", "--dryrun", "--unlock"}  # options of Snakemake after which there is nothing to tell
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
    recipe, frozen = compose_stage(run, folder.parent.name, folder.name).recipe, folder / "recipe.yaml"
    before = stages.read(folder, folder.name, folder.parent) if frozen.is_file() else None
    number, pace = (recipe.steps, None) if before is None else (recipe.steps or before.total, before.middle("seconds"))
    cost = "" if number is None else f"; {number} steps" + (f", about {duration(number * pace)}" if pace is not None else "")
    if before is None or (before.saved is None and not (folder / "checkpoint.json").is_file()):
        return f"{folder}: is trained{cost}"
    changed = "; ".join(differences(yaml_files.read(frozen), plain(recipe)))
    if before.saved is not None and before.saved < (before.total or 0):
        if not changed:
            return f"{folder}: goes on behind step {before.saved}{cost}"
        anew = join(["rm", "-r", str(folder / CHECKPOINTS)])
        return f"{folder}: would be refused at step {before.saved}: {changed}; undo the change, or train anew after: {anew}"
    return f"{folder}: is trained again: {changed or 'what it begins with has changed'}{cost}"


def train(options: Namespace) -> int:
    """Make a run's final draft, and say what came out."""
    results, steps = Path("results") / name_of(options.run), dict[str, int]()

    def look() -> None:
        with suppress(OSError, ValueError):  # of folders that change meanwhile; the run itself goes on
            for line in progress(results, steps):
                print(line, flush=True)

    code = snakemake(*_chosen(options), look=look)
    return code if code or MAKES_NOTHING.intersection(options.snakemake) or not _is_told(results) else report(options)


def _is_told(results: Path) -> bool:
    """Tell whether a run's report is of the stages as they are: --until may have trained one behind it."""
    made = results / "report.json"
    return made.is_file() and all(path.stat().st_mtime <= made.stat().st_mtime for path in results.glob("*/*/checkpoint.json"))


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
