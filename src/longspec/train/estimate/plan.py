"""Print whether each stage fits, its hours and its disk, without loading weights; end with 1 if one does not fit."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspec.atomic_files import named_folder
from longspec.config import Recipe, Runtime, load
from longspec.config.schema import mix_of, shares_of
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import Schedule, chances
from longspec.distributed import share_global_batch
from longspec.families import check_target
from longspec.methods import measures_target
from longspec.models.target_config import read_target_config
from longspec.shown import one_line
from longspec.train.checkpoint.zero_state import KINDS
from longspec.train.estimate import flops
from longspec.train.estimate.memory import GIB, Setup, estimate, gib, out_of_memory, peak, setup_of, table

TYPICAL_FLOPS = 400e12  # operations per second of one GPU, if the user gives none
SLOTS_WHILE_SAVING = 3  # checkpoints: last, last_2 and the one being written
CHECKPOINT_BYTES = 4 * len(KINDS)  # bytes per parameter: float32 weights and moments
DRAFT_FILES = 2  # .safetensors and .pth, in float32


@dataclass(frozen=True)
class Rows:
    """Hold a stage's number of rows, and an average row's document lengths and number of labels."""

    number: int
    documents: list[int]
    labels: int


@dataclass(frozen=True)
class Plan:
    """Hold one stage's figures."""

    setup: Setup
    steps: int
    accumulation: int
    operations: flops.Operations  # of one step, over all ranks
    disk: int

    def hours(self, rate: float) -> float:
        """Return the hours of training if each rank does `rate` operations per second."""
        return self.steps * sum(self.operations) / (rate * self.setup.world_size) / 3600


def read_target(name: str) -> Any:
    """Read the configuration of a target's folder, a target_manifest.json, or a hub name; only config.json is downloaded.

    Raises ValueError if there is none, if a JSON file names no folder, or if the target is not supported.
    """
    path = named_folder(Path(name)) if name.endswith(".json") else name
    config = read_target_config(path)
    check_target(config, f"{path}/config.json")
    return config


def counted_rows(manifest: Path) -> Rows:
    """Return packed data as equal rows, with the average number of documents, document length and labels."""
    counted = PackedRows(manifest).manifest
    number, pieces = counted["rows"], counted["pieces"]
    return Rows(number, [counted["tokens"] // pieces] * round(pieces / number), max(1, counted["labels"] // number))


def whole_rows(number: int, length: int) -> Rows:
    """Return rows of one document each with every token trained: the most expensive ones."""
    return Rows(number, [length], length - 1)


def disk_bytes(setup: Setup) -> int:
    """Return the bytes of checkpoints at their most, plus the draft's folder, whose files may hold more than is trained."""
    with torch.device("meta"):
        published = setup.method.published(setup.method.layer(setup.config, setup.settings).state_dict(), setup.settings)
    draft = DRAFT_FILES * 4 * sum(tensor.numel() for tensor in published.values())
    return SLOTS_WHILE_SAVING * CHECKPOINT_BYTES * setup.draft_parameters + draft


def plan_stage(
    config: Any, recipe: Recipe, runtime: Runtime, own: Sequence[Rows], world_size: int, device: torch.device
) -> Plan:
    """Plan one stage. own: rows of each of its data sets; replayed rows are counted like those of the first.

    Raises ValueError if the data or the ranks do not fit the global batch.
    """
    sources = [*own, *[own[0]] * len(recipe.data.replay)]
    # The chance that a row of a global batch comes from each source.
    chance = chances([1] * len(sources), [each.labels for each in sources], shares_of(recipe.data))
    schedule = Schedule([each.number for each in sources], chance, recipe.global_batch, 0, len(own))
    steps = recipe.steps or schedule.steps(recipe.epochs)
    micro_batch, accumulation = share_global_batch(recipe.global_batch, runtime.micro_batch, world_size)
    wide = recipe.precision == "fp32" or (recipe.precision != "bf16" and device.type == "cpu")
    dtype = torch.float32 if wide else torch.bfloat16
    setup = setup_of(config, recipe, runtime, micro_batch, world_size, dtype, device)
    measured = measures_target(recipe, runtime)
    of = (setup.config, setup.method, setup.settings, setup.sequence_length)
    of_sources = np.array(
        [flops.operations(*of, each.documents, each.labels, recipe.states, with_llm_loss=measured) for each in sources]
    )
    operations = flops.Operations(*map(float, recipe.global_batch * np.array(chance) @ of_sources))
    return Plan(setup, steps, accumulation, operations, disk_bytes(setup))


def stage_lines(recipe: Recipe, plan: Plan, rate: float, available: int) -> list[str]:
    """Return batches, memory, time and disk of one stage, whether it fits, and what to change if it does not."""
    setup, each, needed = plan.setup, plan.operations, peak(estimate(plan.setup))
    total = sum(each)
    fits = f"fits {gib(available)} with {gib(available - needed)} to spare"
    if needed > available:
        fits = f"DOES NOT FIT: {out_of_memory(setup, available)}"
    tokens = recipe.global_batch * setup.sequence_length
    return [
        f"stage {recipe.stage}: {plan.steps} steps of {recipe.global_batch} rows of {setup.sequence_length} tokens ({tokens:,} "
        f"tokens); {setup.world_size} ranks x {plan.accumulation} micro batches of {setup.micro_batch} rows; "
        f"ZeRO-{setup.zero_stage}, optimizer offload {setup.offload}, target {setup.target}, {setup.dtype}",
        f"  draft {setup.draft_parameters:,} parameters; target {gib(setup.target_bytes)}",
        table(setup),
        f"  time: {total:.3g} operations a step (target {each.target / total:.0%}, draft "
        f"{each.draft / total:.0%}, head {each.head / total:.0%}); at {rate / 1e12:.0f} TFLOP/s a rank "
        f"{total / rate / setup.world_size:.1f} s a step, {plan.hours(rate):.1f} hours in all",
        f"  disk: {gib(plan.disk)} (checkpoints while one is saved, and the draft)",
        f"  {fits}",
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m longspec.train plan", description=__doc__)
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", required=True, metavar="FILE", help="recipe.yaml of each stage")
    add("--runtime", type=Path, nargs="+", required=True, metavar="FILE", help="runtime.yaml of each stage")
    add("--target", required=True, help="its folder, its target_manifest.json or its name on the hub")
    data = "manifest.json of each stage's packed rows; of a mix those of each data set, in the order of their names"
    add("--data", type=Path, nargs="+", metavar="FILE", help=data)
    add("--rows", type=int, nargs="+", metavar="N", help="or how many")
    add("--ranks", type=int, required=True, metavar="N", help="processes, one for each GPU")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="what the stages are trained on; default: %(default)s")
    add("--gpu-memory-gib", type=float, default=80.0, metavar="GIB", help="memory of one rank's device; default: %(default)g")
    add("--flops", type=float, default=TYPICAL_FLOPS, help="operations a second of one rank; default: %(default)g")
    return parser


def read_rows(options: argparse.Namespace, recipes: list[Any]) -> list[list[Rows]]:
    """Return the rows of each stage, for each of its data sets. Raises ValueError if their numbers do not match."""
    recipe_of = [recipe for recipe in recipes for _ in mix_of(recipe.data.name)]
    if len(options.data or options.rows or []) != len(recipe_of):
        raise ValueError(f"give --data or --rows for each of the stages' {len(recipe_of)} data sets: they decide the steps")
    if options.data:
        left = map(counted_rows, options.data)
    else:
        left = map(whole_rows, options.rows, (recipe.data.sequence_length for recipe in recipe_of))
    return [[next(left) for _ in mix_of(recipe.data.name)] for recipe in recipes]


def main(argv: list[str]) -> int:
    """Print the plan; return 0 if every stage fits, 1 if one does not or something is wrong."""
    options = parser().parse_args(argv)
    available, rate = int(options.gpu_memory_gib * GIB), options.flops
    try:
        files = [len(options.recipe), len(options.runtime)]
        if files[0] != files[1]:
            raise ValueError(f"--runtime: {files[1]} files for {files[0]} of --recipe; give one for each stage, in their order")
        pairs = zip(options.recipe, options.runtime, strict=True)
        stages = [(load(recipe, Recipe), load(runtime, Runtime)) for recipe, runtime in pairs]
        config = read_target(options.target)
        rows = read_rows(options, [recipe for recipe, _ in stages])
        plans = [
            plan_stage(config, recipe, runtime, own, options.ranks, torch.device(options.device))
            for (recipe, runtime), own in zip(stages, rows, strict=True)
        ]
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    for (recipe, _), plan in zip(stages, plans, strict=True):
        print("\n".join(stage_lines(recipe, plan, rate, available)))
    return int(any(peak(estimate(plan.setup)) > available for plan in plans))
