"""GLIDE, EAGLE-3 and EAGLE-3 with a sliding window at equal data: acceptance by text, length and position, time, memory, disk.

    python benchmarks/methods.py --seeds 42 43 44                the demo's target (after `make demo`, or it is made here)
    python benchmarks/methods.py --size smollm2 --seeds 42       SmolLM2-135M; answers and states are made once for all
    python benchmarks/methods.py --page                          keeps the report of the first seed too

The methods are the variants of one run (config/run/glide-vs-eagle3.yaml here), so all train the same rows in the same steps.
Snakemake trains and measures them in a copy of the workflow, .cache/benchmarks/methods. A cell is a method and a seed, and a
line of benchmarks/results/methods.jsonl as soon as it is done: started again, the same command goes on behind the last one,
and within a cell from the last checkpoint or prompt. Changed recipes or tasks make cells of their own. The table is
benchmarks/results/methods.json; differences are to GLIDE of the same seed.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from benchmarks.cells import Cell, fill, over_seeds
from benchmarks.workflow_copy import EXPERIMENTS, WorkflowCopy
from longspec import jsonl
from longspec.atomic_files import read_json, sha256_text
from longspec.config import CONFIG_DIR, Recipe, compose_stage, load, stages_of, to_yaml
from longspec.config.run_file import read_run
from longspec.methods import method_of
from longspec.models.target_config import read_target_config
from longspec.states.declaration import bytes_a_token, stored_tensors

GLIDE, EAGLE3, WINDOW = "GLIDE", "EAGLE-3", "EAGLE-3, window"
CELLS = machine.RESULTS / "methods.jsonl"
COPY = WorkflowCopy(machine.WORK / "methods")
SUMS = ("new_tokens", "rounds", "mismatches", "near_ties")


@dataclass(frozen=True)
class Size:
    """A target's run, the variant of each method, and two tasks of one kind of text: the shortest and the longest prompts.

    config: further values for Snakemake's --config.
    """

    run: str
    model: str
    variants: dict[str, str]
    ends: tuple[str, str]
    config: tuple[str, ...] = ()


def size_of(name: str, run: str, model: str, ends: tuple[str, str], *config: str) -> Size:
    """A size whose variants are named after it."""
    return Size(run, model, {GLIDE: f"{name}-glide", EAGLE3: f"{name}-eagle3", WINDOW: f"{name}-eagle3-window"}, ends, config)


# Half of SmolLM2's questions: a training on one core stays within 25 minutes.
SMOLLM2 = "data={smollm2-questions: {records: 1800}}"
SIZES = {
    "demo": size_of("demo", "glide-vs-eagle3", "demo", ("1k", "4k")),
    "smollm2": size_of("smollm2", "smollm2-glide-vs-eagle3", "smollm2-135m", ("2k", "6k"), SMOLLM2),
}


def identity(size: str, method: str, seed: int) -> Cell:
    """The fields that a cell is known by; `decided_by`: a hash of the recipes, but for the seed, and of what is measured."""
    run, variant = SIZES[size].run, SIZES[size].variants[method]
    configs = [compose_stage(run, variant, stage, EXPERIMENTS) for stage in stages_of(run, EXPERIMENTS)]
    said = read_run(run, [EXPERIMENTS, CONFIG_DIR]).says.evaluation
    asked = {key: said[key] for key in said if key != "bench"}  # which is measured by no cell
    decided = json.dumps([*(to_yaml(config.recipe) for config in configs), asked, *SIZES[size].config], sort_keys=True)
    return {"size": size, "method": method, "seed": seed, "decided_by": sha256_text(decided)[:16]}


def make_cell(which: Cell, cores: str) -> Cell:
    """Train and measure one method from one seed, and read what came of it."""
    size = SIZES[which["size"]]
    run, stages, variant = seeded(size, which["seed"]), stages_of(size.run, EXPERIMENTS), size.variants[which["method"]]
    folder = f"results/{run}/{variant}"
    made = f"{folder}/evaluation/{stages[-1]}.jsonl"
    COPY.make(made, "--cores", cores, "--config", f"runs=[{run}]", "keep_states=true", *size.config)
    training = {stage: trained(list(jsonl.read(COPY.folder / folder / stage / "metrics.jsonl"))) for stage in stages}
    recipe = load(COPY.folder / folder / stages[-1] / "recipe.yaml", Recipe)
    return {
        "cores": cores,
        "training": training,
        "bytes_a_token": stored_bytes(recipe, COPY.folder / f"models/{size.model}/target_manifest.json"),
        "acceptance": measured(list(jsonl.read(COPY.folder / made))),
    }


def seeded(size: Size, seed: int) -> str:
    """The name of the size's run with a seed, which is written into the copy."""
    values = {stage: {"recipe": {"seed": seed}} for stage in stages_of(size.run, EXPERIMENTS)}
    return COPY.add_run(f"{size.run}-seed-{seed}", size.run, values)


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
    """Of an evaluation's lines, by task and shape: sums, and for each position how often its token was kept and was reached."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(json.dumps([line["task"], line["shape"]]), []).append(line)
    return [
        {
            **{name: held[0][name] for name in ("task", "shape")},
            "prompts": len(held),
            **{name: sum(line[name] for line in held) for name in SUMS},
            "positions": summed([line["positions"] for line in held]),
        }
        for held in groups.values()
    ]


def summed(positions: list[list[list[int]]]) -> list[list[int]]:
    """Counts [kept, reached] of each position, over several lists of them."""
    return [[sum(counts) for counts in zip(*pairs, strict=True)] for pairs in zip(*positions, strict=True)]


def stored_bytes(recipe: Any, target: Path) -> dict[str, int]:
    """Bytes a token of the states that are stored for offline training, in bfloat16; labels whole, and of 64 tokens."""
    (method, settings), manifest = method_of(recipe), read_json(target)
    config = read_target_config(str(COPY.folder / manifest["path"]))
    reads = method.reads(config, settings, with_llm_loss=False)
    return {name: bytes_a_token(stored_tensors(reads, "bfloat16", k)) for name, k in (("whole", None), ("top_64", 64))}


def figures(cell: Cell) -> dict[str, float]:
    """The numbers of a cell that stand in the table, of chains alone.

    Tokens a round over all tasks and by task, `flat`: those of the longest prompts over those of the shortest; the share of
    rounds with all tokens before it in which each drafted token was kept, over all tasks; and what training took.
    """
    chains = [row for row in cell["acceptance"] if isinstance(row["shape"], int)]
    tasks = list(dict.fromkeys(row["task"] for row in chains))
    found = {name: length([row for row in chains if name in (row["task"], "all")]) for name in ("all", *tasks)}
    short, long = SIZES[cell["size"]].ends
    found["flat"] = found[long] / found[short]
    positions = summed([row["positions"] for row in chains])
    found |= {f"position {place}": kept / reached for place, (kept, reached) in enumerate(positions, 1) if reached}
    stages = cell["training"].values()
    return found | {
        "seconds": sum(stage["seconds"] for stage in stages),
        "seconds a step": sum(stage["seconds"] for stage in stages) / sum(stage["steps"] for stage in stages),
        "peak GiB": max(stage["peak_bytes"] for stage in stages) / 2**30,
        "tokens trained": sum(stage["tokens"] for stage in stages),
        "bytes a token offline": cell["bytes_a_token"]["whole"],
        "bytes a token offline, top 64": cell["bytes_a_token"]["top_64"],
    }


def length(rows: list[dict[str, Any]]) -> float:
    """Tokens a round."""
    return sum(row["new_tokens"] for row in rows) / sum(row["rounds"] for row in rows)


def table(cells: Sequence[Cell]) -> dict[str, Any]:
    """By size and method, each figure over the seeds, and its difference to GLIDE over those seeds that both have."""
    told: dict[str, Any] = {}
    for size, method in ((name, method) for name in SIZES for method in SIZES[name].variants):
        own, glide = ({c["seed"]: figures(c) for c in cells if (c["size"], c["method"]) == (size, m)} for m in (method, GLIDE))
        for figure in dict.fromkeys(figure for numbers in own.values() for figure in numbers):
            values = {seed: numbers[figure] for seed, numbers in own.items() if figure in numbers}
            told.setdefault(size, {}).setdefault(method, {})[figure] = row = over_seeds(list(values.values()))
            both = [value - glide[seed][figure] for seed, value in values.items() if figure in glide.get(seed, ())]
            if method != GLIDE and both:
                row["to GLIDE"] = over_seeds(both)
    return told


def main() -> None:
    """Make the cells that are missing, and the table of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--cores", default="all", help="as of snakemake; times of cells made with other numbers do not compare")
    parser.add_argument("--page", action="store_true", help="measure the baselines of the first seed too, and keep its report")
    options = parser.parse_args()
    size = SIZES[options.size]
    COPY.refresh()
    COPY.take([f"models/{size.model}", *(["data"] if options.size == "demo" else [])])
    wanted = [identity(options.size, method, seed) for seed in options.seeds for method in size.variants]
    fill(CELLS, wanted, lambda which: make_cell(which, options.cores))
    if options.page:
        page = f"results/{seeded(size, options.seeds[0])}/report.html"
        config = (f"runs=[{Path(page).parent.name}]", "keep_states=true", *size.config)
        COPY.make(page, "--cores", options.cores, "--config", *config)
        shutil.copy2(COPY.folder / page, machine.RESULTS / f"methods_{options.size}.html")
    known = [identity(name, method, 0) for name in SIZES for method in SIZES[name].variants]
    cells = [cell for cell in jsonl.read(CELLS) if any((one | {"seed": cell["seed"]}).items() <= cell.items() for one in known)]
    machine.write("methods", {"machine": machine.describe(("torch", "transformers", "deepspeed")), "sizes": table(cells)})


if __name__ == "__main__":
    main()
