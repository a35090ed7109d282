"""Draft methods at equal cost: acceptance by text, length, shape and position, time, memory, disk, and speed in engines.

    python benchmarks/methods.py --seeds 42 43 44                       the demo's target, the same steps (after `make demo`)
    python benchmarks/methods.py --size demo-times                      what a step takes: let nothing else run meanwhile
    python benchmarks/methods.py --size demo-minutes --seeds 42 43 44   the same minutes of training; after demo-times
    python benchmarks/methods.py --size smollm2                         SmolLM2-135M; answers and states are made once for all
    python benchmarks/methods.py --engines                              the first seed's drafts in vLLM and llama.cpp too

The methods are the variants of one run (config/run/methods.yaml here), so all train the same rows in the same order. Snakemake
trains and measures them in a copy of the workflow, .cache/benchmarks/methods. A cell is a method and a seed, and a line of
benchmarks/results/methods.jsonl as soon as it is done: started again, the same command goes on behind the last one, and within
a cell from the last checkpoint or prompt. Changed recipes or tasks make cells of their own. Every call writes the page of all
cells that are there, benchmarks/results/methods.html, and its numbers, methods.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from benchmarks.cells import Cell, fill
from benchmarks.methods_page import write_page
from benchmarks.workflow_copy import EXPERIMENTS, WorkflowCopy
from longspec import jsonl
from longspec.atomic_files import read_json, sha256_text
from longspec.config import CONFIG_DIR, Recipe, compose_stage, load, stages_of, to_yaml
from longspec.config.run_file import read_run
from longspec.methods import method_of
from longspec.models.target_config import read_target_config
from longspec.states.declaration import bytes_a_token, stored_tensors
from longspec.workflow import paths

GLIDE, EAGLE3, WINDOW, DFLASH = "GLIDE", "EAGLE-3", "EAGLE-3, window", "DFlash"
CELLS = machine.RESULTS / "methods.jsonl"
COPY = WorkflowCopy(machine.WORK / "methods")
FOLDERS = [EXPERIMENTS, CONFIG_DIR]  # of runs
ENGINES = "engines"  # in place of a method: a line of what engines make of a seed's drafts


@dataclass(frozen=True)
class Size:
    """A target's run, and the variant of each method.

    title: of its part of the page; config: further values for Snakemake's --config; stop: the steps after which each stage ends
    and nothing is measured but these; times: the size of such steps, by which minutes are told; same_minutes: whether the
    slowest method decides how many minutes all others are trained, and not the recipe's steps.
    """

    title: str
    run: str
    model: str
    variants: dict[str, str]
    config: tuple[str, ...] = ()
    stop: int | None = None
    times: str | None = None
    same_minutes: bool = False


def variants_of(name: str) -> dict[str, str]:
    """The variants that are named after a target."""
    return {
        method: f"{name}-{method.lower().replace('-', '').replace(', ', '-')}" for method in (GLIDE, EAGLE3, WINDOW, DFLASH)
    }


# A part of SmolLM2's questions: a training on one core stays within 25 minutes.
SMOLLM2 = "data={smollm2-questions: {records: 1800}}"
DEMO = ("methods", "demo", variants_of("demo"))
SIZES = {
    "demo": Size("The demo's target, the same steps", *DEMO, times="demo-times"),
    "demo-minutes": Size("The demo's target, the same minutes of training", *DEMO, times="demo-times", same_minutes=True),
    "demo-times": Size("", *DEMO, stop=24),
    "smollm2": Size("SmolLM2-135M, the same steps", "smollm2-methods", "smollm2-135m", variants_of("smollm2"), (SMOLLM2,)),
}


def identity(size: str, method: str, seed: int) -> Cell:
    """The fields that a cell is known by; `decided_by`: a hash of the recipes, but for the seed, and of what is measured."""
    run, variant = SIZES[size].run, SIZES[size].variants[method]
    configs = [compose_stage(run, variant, stage, EXPERIMENTS) for stage in stages_of(run, EXPERIMENTS)]
    said = read_run(run, FOLDERS).says.evaluation
    asked = {key: said[key] for key in said if key != "bench"}  # which is measured by no cell
    decided = json.dumps([*(to_yaml(config.recipe) for config in configs), asked, *SIZES[size].config], sort_keys=True)
    return {"size": size, "method": method, "seed": seed, "decided_by": sha256_text(decided)[:16]}


def make_cell(which: Cell, cores: str) -> Cell:
    """Train and measure one method from one seed, and read what came of it."""
    size = SIZES[which["size"]]
    run, stages, variant = run_of(which), stages_of(size.run, EXPERIMENTS), size.variants[which["method"]]
    folder = f"results/{run}/{variant}"
    made = f"{folder}/{stages[-1]}/checkpoint.json" if size.stop else f"{folder}/evaluation/{stages[-1]}.jsonl"
    COPY.make(made, "--cores", cores, "--config", f"runs=[{run}]", "keep_states=true", *size.config)
    training = {stage: trained(list(jsonl.read(COPY.folder / folder / stage / "metrics.jsonl"))) for stage in stages}
    found: Cell = {"cores": cores, "training": training}
    if size.stop:
        return found
    recipe = load(COPY.folder / folder / stages[-1] / "recipe.yaml", Recipe)
    return found | {
        "bytes_a_token": stored_bytes(recipe, COPY.folder / f"models/{size.model}/target_manifest.json"),
        "acceptance": measured(list(jsonl.read(COPY.folder / made))),
    }


def run_of(which: Cell) -> str:
    """The name of the run of a cell, which is written into the copy."""
    size = SIZES[which["size"]]
    stages = stages_of(size.run, EXPERIMENTS)
    values: dict[str, dict[str, Any]] = {stage: {"recipe": {"seed": which["seed"]}} for stage in stages}
    name = f"{size.run}-seed-{which['seed']}"
    if size.stop:
        name += "-times"
        for stage in stages:
            values[stage]["recipe"]["steps"] = size.stop
    if size.same_minutes:
        times = {cell["method"]: cell["training"] for cell in current() if cell["size"] == size.times}
        if times.keys() != size.variants.keys():
            sys.exit(f"error: --size {which['size']}: first make those of --size {size.times}")
        name += f"-minutes-{size.variants[which['method']]}"
        for stage in stages:
            steps = compose_stage(size.run, size.variants[GLIDE], stage, EXPERIMENTS).recipe.steps
            values[stage]["recipe"]["steps"] = steps_of_equal_minutes(times, which["method"], stage, steps)
    return COPY.add_run(name, size.run, values)


def steps_of_equal_minutes(times: dict[str, Any], method: str, stage: str, steps: int) -> int:
    """The steps that a method makes while the slowest one makes so many."""
    slowest = max(training[stage]["seconds_a_step"] for training in times.values())
    return round(steps * slowest / times[method][stage]["seconds_a_step"])


def serve(which: Cell, cores: str) -> Cell:
    """Measure a seed's drafts in every engine that is installed and loads them."""
    run, environments = run_of(which | {"method": GLIDE}), COPY.folder / ".venv-serve"
    if not environments.exists():
        environments.symlink_to(machine.ROOT / ".venv-serve")
    size, numbers = SIZES[which["size"]], paths.PAGE.format(run=run, measured="serves").replace(".html", ".json")
    COPY.make(numbers, "--cores", cores, "--config", f"runs=[{run}]", "keep_states=true", *size.config)
    found = read_json(COPY.folder / numbers)["variants"]
    return {"served": {method: found[variant] for method, variant in size.variants.items()}}


def trained(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a stage's metrics: what it has seen, seconds in all and of the median step, and the process's peak memory."""
    peaks = [step[name] for step in steps for name in ("peak_rss_bytes", "peak_gpu_bytes") if name in step]
    return {
        "steps": len(steps),
        **{name: sum(step[name] for step in steps) for name in ("tokens", "labels", "seconds")},
        "seconds_a_step": median(step["seconds"] for step in steps),
        "peak_bytes": max(peaks),
    }


def measured(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of an evaluation's lines, by task and shape: sums, kept and reached of each position, and each prompt's own counts."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(json.dumps([line["task"], line["shape"]]), []).append(line)
    return [
        {
            **{name: held[0][name] for name in ("task", "shape")},
            **{name: sum(line[name] for line in held) for name in ("mismatches", "near_ties")},
            "positions": summed([line["positions"] for line in held]),
            "prompts": [[line[name] for name in ("record", "new_tokens", "rounds")] for line in held],
        }
        for held in groups.values()
    ]


def length(rows: Sequence[dict[str, Any]]) -> float:
    """Tokens a round of such groups."""
    counts = [prompt for row in rows for prompt in row["prompts"]]
    return sum(new for _, new, _ in counts) / sum(rounds for _, _, rounds in counts)


def summed(positions: list[list[list[int]]]) -> list[list[int]]:
    """Counts [kept, reached] of each position, over several lists of them."""
    return [[sum(counts) for counts in zip(*pairs, strict=True)] for pairs in zip(*positions, strict=True)]


def stored_bytes(recipe: Any, target: Path) -> dict[str, int]:
    """Bytes a token of the states that are stored for offline training, in bfloat16; labels whole, and of 64 tokens."""
    (method, settings), manifest = method_of(recipe), read_json(target)
    config = read_target_config(str(COPY.folder / manifest["path"]))
    reads = method.reads(config, settings, with_llm_loss=False)
    return {name: bytes_a_token(stored_tensors(config, reads, "bfloat16", k)) for name, k in (("whole", None), ("top_64", 64))}


def is_current(cell: Cell) -> bool:
    """Whether a cell was made of what its recipes and tasks are now."""
    method = GLIDE if cell["method"] == ENGINES else cell["method"]
    known = cell["size"] in SIZES and method in SIZES[cell["size"]].variants
    return known and identity(cell["size"], method, cell["seed"])["decided_by"] == cell["decided_by"]


def current() -> list[Cell]:
    """The cells of the file that were made of what their recipes and tasks are now, with each task's data set."""
    cells = [cell for cell in jsonl.read(CELLS) if is_current(cell)] if CELLS.is_file() else []
    for cell in cells:
        tasks = read_run(SIZES[cell["size"]].run, FOLDERS).says.evaluation["tasks"]
        for row in cell.get("acceptance", []):
            row["data"] = tasks[row["task"]]["data"]
    return cells


def main() -> None:
    """Make the cells that are missing, and the page of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--cores", default="all", help="as of snakemake; times of cells made with other numbers do not compare")
    parser.add_argument("--engines", action="store_true", help="measure the first seed's drafts in vLLM and llama.cpp too")
    options = parser.parse_args()
    size = SIZES[options.size]
    COPY.refresh()
    COPY.take([f"models/{size.model}", *(["data"] if size.model == "demo" else [])])
    wanted = [identity(options.size, method, seed) for seed in options.seeds for method in size.variants]
    fill(CELLS, wanted, lambda which: make_cell(which, options.cores))
    if options.engines:
        engines = identity(options.size, GLIDE, options.seeds[0]) | {"method": ENGINES}
        fill(CELLS, [engines], lambda which: serve(which, options.cores))
    write_page(machine.RESULTS, {name: (one.title, one.times) for name, one in SIZES.items() if one.title}, current())


if __name__ == "__main__":
    main()
