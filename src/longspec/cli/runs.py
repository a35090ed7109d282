"""`longspec plan`, `train` and `report`: a run from its file to its draft, by Snakemake."""

import re
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from shlex import join

from longspec import methods
from longspec.atomic_files import read_json
from longspec.cluster import stages
from longspec.cluster.resume import SNAKEMAKE
from longspec.config import compose_stage, differences, plain, yaml_files
from longspec.config.run_file import CONFIG_DIR, default_method, name_of, read_run
from longspec.data.layout_tally import unlike_served_warning
from longspec.engines import VLLM
from longspec.report import ending
from longspec.shown import duration
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS
from longspec.train.stage_folder import SAME_BY_HASH, set_aside
from longspec.workflow.checks import bench_of, checked_plan
from longspec.workflow.plan import Plan
from longspec.workflow.settings import datasets
from longspec.workflow.unnoticed import unnoticed

# Options of Snakemake that make nothing, so that there is no report; -n may stand among other letters.
MAKES_NOTHING = re.compile(r"-(?![cj])[a-zA-Z]*n[a-zA-Z]*|--(dry-?run|unlock|summary|lint|dag|rulegraph|touch|list-rules)")
CHANGED = "what it begins with has changed"
EVERY = 30.0  # seconds between two looks at the stages that train


def _chosen(options: Namespace) -> list[str]:
    """Return Snakemake's arguments. It reads the last --config only, so the user's own are joined into one with the run."""
    settings = ArgumentParser(add_help=False, allow_abbrev=False)
    settings.add_argument("--config", "-C", nargs="*", action="extend", default=[])
    given, others = settings.parse_known_args(options.snakemake)
    return ["final_draft", *others, "--config", f"run={options.run}", *given.config]


def snakemake(*arguments: str, look: Callable[[], None] = lambda: None) -> int:
    """Run Snakemake and return its exit code. look: called every EVERY seconds meanwhile. Ctrl-C ends Snakemake first."""
    process, code = subprocess.Popen([*SNAKEMAKE, *arguments]), None
    try:
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(EVERY)
            if code is None:
                look()
    except KeyboardInterrupt:  # the terminal has sent it to Snakemake too
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
    """Print what would run: which stages train, and in which keys they differ from what is there. Return the exit code."""
    done = subprocess.run([*SNAKEMAKE, "--summary", *_chosen(options)], capture_output=True, text=True)
    if done.returncode:
        print("\n".join(line for line in done.stderr.splitlines() if not line.startswith(("Using", "Config file"))))
        return done.returncode
    checked = plan_of(options.run)
    print("".join(f"{line}\n" for line in unnoticed(checked, bench_of(checked))), end="")
    # A line for each file: its name, date, rule, log, status, plan.
    files = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    made = {name: rule for name, _, rule, *_, planned in files if planned == "update pending"}
    if not made:
        print("nothing to be done: all files are there and up to date")
        return 0
    trained = [Path(name).parent for name, rule in made.items() if rule == "train"]
    run = read_run(options.run, [CONFIG_DIR])
    for variant in dict.fromkeys(folder.parent for folder in trained):
        before = False
        for stage in run.says.stages:
            folder = variant / stage
            told = _stage(options.run, folder, begins_anew=before) if folder in trained else f"{folder}: stays as it is"
            print(told)
            before = before or folder in trained
    if not trained:
        print("no stage is trained: all drafts stay as they are")
    method = run.says.method or default_method()
    if VLLM not in methods.settings_of(method).SERVED:
        print(f"no engine loads {method} drafts; transformers' generate and ours do (docs/generate.md)")
    print(f"{len(made)} files are made, by the rules {', '.join(dict.fromkeys(made.values()))}")
    return 0


def _stage(run: str, folder: Path, *, begins_anew: bool) -> str:
    """Return why a stage is to be trained, its steps, and their time if an earlier training shows its pace.

    begins_anew: whether a stage before it is trained too. The newest checkpoint counts, as in the trainer (find_resumable).
    """
    recipe = compose_stage(run, folder.parent.name, folder.name).recipe
    before = stages.read(folder, folder.name, folder.parent) if (folder / "recipe.yaml").is_file() else None
    whole = (folder / "checkpoint.json").is_file()
    if before is None or (before.saved is None and not whole):
        return f"{folder}: is trained{_cost(before, recipe.steps)}"
    lines = differences(before.recipe or yaml_files.read(folder / "recipe.yaml"), plain(recipe), "recipe.")
    places = [line.removeprefix("recipe.") for line in lines if line.partition(": ")[0] in SAME_BY_HASH]
    changed = "; ".join(line.removeprefix("recipe.") for line in lines if line.partition(": ")[0] not in SAME_BY_HASH)
    kept = [aside for aside, manifest in set_aside(folder / CHECKPOINTS) if manifest["identity"].get("recipe") == plain(recipe)]
    if changed and kept and not begins_anew:
        return f"{folder}: goes back to the checkpoints of these settings, which {kept[0]} keeps"
    changed = changed or (CHANGED if begins_anew else "")
    left = 0 if before.saved is None else (before.total or 0) - before.saved
    if places and not changed:
        otherwise = "would be refused" if left > 0 else "is trained again"
        return f"{folder}: stays or goes on if it is the same by its hash, else it {otherwise}: {'; '.join(places)}"
    if left > 0 and changed:
        anew = join(["rm", "-r", str(folder / CHECKPOINTS)])
        return f"{folder}: would be refused at step {before.saved}: {changed}; undo that, or train anew after: {anew}"
    if not changed and (left > 0 or not whole):
        return f"{folder}: goes on behind step {before.saved}{_cost(before, left)}"
    return f"{folder}: is trained again: {changed or CHANGED}{_cost(before, recipe.steps)}"


def _cost(before: stages.Stage | None, steps: int | None) -> str:
    """Return the steps that are left, and their time at the pace of the last ones, as the end of a line."""
    pace = None if before is None else before.middle("seconds")
    return "" if steps is None else f"; {steps} steps" + ("" if pace is None else f", about {duration(steps * pace)}")


def train(options: Namespace) -> int:
    """Make a run's final draft and print its report; return the exit code."""
    results, steps, warned = Path("results") / name_of(options.run), dict[str, int](), set[str]()

    @cache
    def rows() -> list[str]:
        with suppress(OSError, ValueError):  # Snakemake says what is wrong with the run
            return plan_of(options.run).trained_rows(results.name)
        return []

    def look() -> None:
        with suppress(OSError, ValueError):  # folders change meanwhile; the run itself goes on
            for line in (*progress(results, steps), *unlike_served(rows(), warned)):
                print(line, flush=True)

    code = snakemake(*_chosen(options), look=look)
    made = not any(map(MAKES_NOTHING.fullmatch, options.snakemake)) and _is_told(results)
    return report(options) if made and not code else code


def _is_told(results: Path) -> bool:
    """Tell whether a run's report is of the stages as they are; with --until one may have been trained after it."""
    made = results / "report.json"
    return made.is_file() and all(path.stat().st_mtime <= made.stat().st_mtime for path in results.glob("*/*/checkpoint.json"))


def unlike_served(rows: list[str], told: set[str]) -> list[str]:
    """Return the warnings of packed rows that are there by now, each once. told: paths that were looked at; updated."""
    there = [path for path in rows if path not in told and Path(path).is_file()]
    told.update(there)
    return [warning for path in there if (warning := unlike_served_warning(read_json(Path(path))))]


def progress(results: Path, told: dict[str, int]) -> list[str]:
    """Return a line for each stage below a run's folder that has moved on. told: each stage's last step; updated."""
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
    """Print a finished run's report and return 0. Raises ValueError if there is no report yet."""
    name = name_of(options.run)
    told = ending.lines(name, options.run)
    if not told:
        raise ValueError(f"results/{name}/report.json: no such file; make it first: longspec train {options.run}")
    if not _is_told(Path("results") / name):
        print(f"This report is older than the stages that are trained by now; make it again: longspec train {options.run}")
    print("\n".join(told))
    return 0
