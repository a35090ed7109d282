"""Print whether each stage fits, how long it will take and what it will leave on the disk; ends with 1 if one does not fit.

All is told by the configurations and the target's config.json; no weights are loaded or fetched.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspec.atomic_files import read_json
from longspec.config import OFFLINE, ConfigError, Recipe, Runtime, States, compose, load
from longspec.data.layout_tally import unlike_served_warning
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.replay import Schedule, chances
from longspec.distributed import share_global_batch
from longspec.families import check_target
from longspec.methods import measures_target
from longspec.models.target_config import read_target_config
from longspec.shown import named_path, one_line
from longspec.states.declaration import bytes_a_token, stored_tensors
from longspec.train.checkpoint.zero_state import KINDS
from longspec.train.estimate import flops
from longspec.train.estimate.memory import GIB, Setup, alternatives, estimate, gib, peak, setup_of, table

TYPICAL_FLOPS = 400e12  # operations a second of one GPU, where nobody says them
FOR_GPUS = "planned for GPUs, of which this machine has none; --device cpu plans for processors, without CUDA's own memory"
SAMPLE = 256  # rows that stand for all when documents are counted
SLOTS_WHILE_SAVING = 3  # of checkpoints: last, last_2 and the one being written
CHECKPOINT_BYTES = 4 * len(KINDS)  # a parameter: float32 weights and moments
DRAFT_FILES = 2  # .safetensors and .pth, in float32
# Time of a job beside training: start, dry batch, resuming; and a factor, since the estimated speed is not exact.
START_MINUTES, TIME_MARGIN = 10, 1.25
RANK_BYTES = 6 * GIB  # of a process with torch, CUDA's libraries and its batches, on the host: a round guess
USAGE = """%(prog)s --recipe FILE ... --runtime FILE ... --target TARGET --ranks N
       %(prog)s -cp DIR -cn NAME ... --target TARGET --ranks N"""


@dataclass(frozen=True)
class Rows:
    """Counts of the rows that a stage trains on: `number` of all; `sampled` of them hold `documents` and `labels`."""

    number: int
    documents: list[int]  # their lengths
    labels: int
    sampled: int
    are_all: bool = True  # False: those of one step, since nobody said how many there are


@dataclass(frozen=True)
class Plan:
    """One stage's figures."""

    setup: Setup
    steps: int
    accumulation: int
    epochs: float  # of its own rows
    operations: flops.Operations  # of one step, over all ranks
    disk: int

    def hours(self, rate: float) -> float:
        """Return the hours of training, when each rank does `rate` operations a second."""
        return self.steps * self.operations.total / (rate * self.setup.world_size) / 3600


def read_target(name: str) -> Any:
    """Read the configuration of a target's folder, of a target_manifest.json, or of a hub name, of which it alone is fetched.

    Raises ValueError when there is none, or the target is not supported.
    """
    path = read_json(Path(name))["path"] if name.endswith(".json") else name
    config = read_target_config(path)
    check_target(config, f"{path}/config.json")
    return config


def counted_rows(manifest: Path) -> Rows:
    """Count packed data: some rows, spread evenly, stand for all."""
    rows = PackedRows(manifest)
    numbers = np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int)
    labels = count_labels(rows.find, numbers)
    return Rows(len(rows), flops.document_lengths(rows, numbers), labels, len(numbers))


def whole_rows(number: int, length: int) -> Rows:
    """Return rows of one document each, every token trained: the most they can cost."""
    return Rows(number, [length], length - 1, 1)


def disk_bytes(setup: Setup) -> int:
    """Return checkpoints at their most, and the draft's folder, whose files may hold more than is trained."""
    with torch.device("meta"):
        published = setup.method.published(setup.method.layer(setup.config, setup.settings).state_dict(), setup.settings)
    draft = DRAFT_FILES * 4 * sum(tensor.numel() for tensor in published.values())
    return SLOTS_WHILE_SAVING * CHECKPOINT_BYTES * setup.draft_parameters + draft


def plan_stage(
    config: Any,
    recipe: Recipe,
    runtime: Runtime,
    rows: Rows,
    world_size: int,
    device: torch.device,
    replayed: Mapping[str, Rows] | None = None,
) -> Plan:
    """Plan one stage. replayed: rows by the earlier stages that they are of; a missing one is counted like the stage's own.

    Raises ValueError when the data or the ranks do not fit the global batch.
    """
    replay = sorted(recipe.data.replay.items())
    sources = [rows, *((replayed or {}).get(name, rows) for name, _ in replay)]
    shares = [1 - sum(share for _, share in replay), *(share for _, share in replay)]
    # Of each source, to be a row of a global batch.
    chance = chances([each.sampled for each in sources], [max(1, each.labels) for each in sources], shares) if replay else [1.0]
    schedule = Schedule([each.number for each in sources], chance, recipe.global_batch, 0)
    steps = recipe.steps or schedule.steps(recipe.epochs)
    micro_batch, accumulation = share_global_batch(recipe.global_batch, runtime.micro_batch, world_size)
    wide = recipe.precision == "fp32" or (recipe.precision == "auto" and device.type == "cpu")
    dtype = torch.float32 if wide else torch.bfloat16
    setup = setup_of(config, recipe, runtime, micro_batch, world_size, dtype, device)
    operations = flops.Operations(0, 0, 0)
    for each, probability in zip(sources, chance, strict=True):
        sampled = _operations(setup, each, recipe.states, with_llm_loss=measures_target(recipe, runtime))
        operations = operations.plus(sampled, probability * recipe.global_batch / each.sampled)
    epochs = steps * recipe.global_batch * chance[0] / rows.number
    return Plan(setup, steps, accumulation, epochs, operations, disk_bytes(setup))


def _operations(setup: Setup, rows: Rows, states: States, *, with_llm_loss: bool) -> flops.Operations:
    """Return the operations over the sampled rows."""
    tokens = rows.sampled * setup.sequence_length
    of = (setup.config, setup.method, setup.settings, tokens, rows.documents, rows.labels, states)
    return flops.operations(*of, with_llm_loss=with_llm_loss)


def speed_up(target: float, draft: float, epochs: float) -> float:
    """Return how many times faster than online so many epochs from stored states are, building included.

    With T operations of the target's forward over all rows and D of the draft's steps, E epochs cost E (T + D) online and
    T + E D offline.
    """
    return epochs * (target + draft) / (target + epochs * draft)


def stored_lines(plan: Plan, recipe: Recipe, runtime: Runtime, rows: Rows, folder: Path, rate: float) -> list[str]:
    """Return what a stage's stored states in `folder` cost and save, at `rate` operations a second of all ranks."""
    if recipe.states.source != OFFLINE:
        return []
    if not rows.are_all:
        return ["  stored states: their disk and hours are told with --data or --rows"]
    setup, states = plan.setup, recipe.states

    def token_bytes(*, held_out: bool) -> int:
        reads = setup.method.reads(setup.config, setup.settings, with_llm_loss=held_out)
        return bytes_a_token(stored_tensors(reads, states.dtype, states.top_k))

    offline, online = (_operations(setup, rows, each, with_llm_loss=False) for each in (states, States()))
    all_rows = rows.number / rows.sampled
    target, draft = online.target * all_rows, (offline.draft + offline.head) * all_rows
    held_out = runtime.held_out_rows if runtime.held_out_every else 0
    disk = setup.sequence_length * (rows.number * token_bytes(held_out=False) + held_out * token_bytes(held_out=True))
    place = folder.resolve()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.is_dir())).free
    room = f"{gib(free)} free at {folder}"
    if disk > free:
        room = (
            f"DOES NOT FIT: {room}; make data/states a link to a folder on another disk; recipe.states.dtype: "
            "float8 and recipe.states.top_k make them smaller"
        )
    top = "" if states.top_k is None else f", the {states.top_k} likeliest tokens"
    return [
        f"  stored states: {token_bytes(held_out=False):,} bytes a token ({states.dtype}{top}), {gib(disk)} of {rows.number:,} "
        f"rows and {held_out} held-out ones; {room}",
        f"  building them: {target:.3g} operations, {target / rate / 3600:.2g} hours at {rate / 1e12:.3g} TFLOP/s",
        f"  {plan.epochs:.3g} epochs from them are up to {speed_up(target, draft, plan.epochs):.2f} times as fast as online, "
        "building included",
    ]


def stage_lines(recipe: Recipe, plan: Plan, rate: float, available: int, stored: list[str]) -> list[str]:
    """Return batches, memory, time and disk of one stage, whether it fits, and what to change when it does not."""
    setup, each, needed = plan.setup, plan.operations, peak(estimate(plan.setup))
    if needed <= available:
        fits = [f"  fits {gib(available)} with {gib(available - needed)} to spare"]
    else:
        fits = [f"  DOES NOT FIT {gib(available)}: {gib(needed - available)} too much. Change one or several of:"]
        fits += [f"    {text:60s} then {gib(then):>12s}" for text, then in alternatives(setup)]
    tokens = recipe.global_batch * setup.sequence_length
    replayed = ", ".join(f"{share:.0%} of {name}" for name, share in sorted(recipe.data.replay.items()))
    return [
        f"stage {recipe.stage}: {plan.steps} steps of {recipe.global_batch} rows of {setup.sequence_length} tokens ({tokens:,} "
        f"tokens); {setup.world_size} ranks x {plan.accumulation} micro batches of {setup.micro_batch} rows; "
        f"ZeRO-{setup.zero_stage}, optimizer offload {setup.offload}, target {setup.target}, {setup.dtype}",
        *([f"  replayed: {replayed} of the trained tokens"] if replayed else []),
        f"  draft {setup.draft_parameters:,} parameters; target {gib(setup.target_bytes)}",
        table(setup),
        f"  time: {each.total:.3g} operations a step (target {each.target / each.total:.0%}, draft "
        f"{each.draft / each.total:.0%}, head {each.head / each.total:.0%}); at {rate / 1e12:.0f} TFLOP/s a rank "
        f"{each.total / rate / setup.world_size:.1f} s a step, {plan.hours(rate):.1f} hours in all",
        f"  disk: {gib(plan.disk)} (checkpoints while one is saved, and the draft)",
        *stored,
        *fits,
    ]


def needs_of(plan: Plan, rate: float, node_gpus: int, longest: int) -> dict[str, int]:
    """Return what one Slurm job of a stage needs, on nodes of `node_gpus` GPUs in at most `longest` minutes.

    memory_mb, of a node, in MB as Slurm counts, is the host's part of the estimate for its ranks, and what each process needs
    besides. Raises ValueError for nodes without a GPU, and when a job is not longer than its start.
    """
    if node_gpus < 1:
        raise ValueError(f"--node-gpus: {node_gpus}: must be at least 1")
    if longest <= START_MINUTES:
        raise ValueError(f"--longest-job: {longest}: a job takes {START_MINUTES} minutes to start; give it more")
    ranks = min(node_gpus, plan.setup.world_size)
    on_host = peak(estimate(plan.setup), on_host=plan.setup.device.type == "cuda")
    minutes = math.ceil(60 * plan.hours(rate) * TIME_MARGIN + START_MINUTES)
    return {"memory_mb": ranks * (on_host + RANK_BYTES) // 10**6, "minutes": min(longest, minutes)}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.train plan", usage=USAGE, description=__doc__)
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", metavar="FILE", help="recipe.yaml of each stage")
    add("--runtime", type=Path, nargs="+", metavar="FILE", help="runtime.yaml of each stage")
    add("-cp", "--config-path", type=Path, metavar="DIR", help="or by name: the experiments' folder, e.g. config/exp")
    add("-cn", "--config-name", nargs="+", metavar="NAME", help="each stage's experiment")
    add("--target", required=True, help="its folder, its target_manifest.json or its name on the hub")
    add("--data", type=Path, nargs="+", metavar="FILE", help="manifest.json of each stage's packed rows")
    add("--rows", type=int, nargs="+", metavar="N", help="or how many; with recipe.steps neither is needed")
    replay = "and of rows that one stage replays; without it they count as its own"
    add("--replay", type=named_path, nargs="+", default=[], metavar="STAGE=MANIFEST", help=replay)
    add("--ranks", type=int, required=True, metavar="N", help="processes, one for each GPU")
    add("--device", choices=("cuda", "cpu"), help="what the stages are trained on; default: cuda")
    add("--gpu-memory-gib", type=float, default=80.0, metavar="GIB", help="memory of one rank's device; default: %(default)g")
    add("--node-gpus", type=int, default=8, metavar="N", help="GPUs of a Slurm node; default: %(default)d")
    add("--json", action="store_true", help="print only what each stage's Slurm jobs need, as JSON")
    place = "where stored states are to lie; default: %(default)s"
    add("--states-folder", type=Path, default=Path("data/states"), metavar="DIR", help=place)
    add("--states-only", action="store_true", help="print only what stored states cost and save")
    add("--longest-job", type=int, default=240, metavar="MINUTES", help="of the longest Slurm job; default: %(default)d")
    add("--flops", type=float, default=TYPICAL_FLOPS, help="operations a second of one rank; default: %(default)g")
    return parser


def read_stages(options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Return recipe and runtime of each stage. Raises ValueError when they do not come in pairs."""
    if options.config_name:
        if options.config_path is None:
            raise ValueError("-cn needs -cp, the folder of the experiments, e.g. -cp config/exp")
        configs = [compose(name, [], options.config_path) for name in options.config_name]
        return [(config.recipe, config.runtime) for config in configs]
    recipes, runtimes = options.recipe or [], options.runtime or []
    if not recipes or len(recipes) != len(runtimes):
        raise ValueError("give --recipe and --runtime, as many of each, or experiments by name: -cp config/exp -cn NAME ...")
    return [(load(recipe, Recipe), load(runtime, Runtime)) for recipe, runtime in zip(recipes, runtimes, strict=True)]


def read_rows(options: argparse.Namespace, recipes: list[Any]) -> list[Rows]:
    """Return the rows of each stage. Raises ValueError when neither the options nor the recipes give them."""
    given = options.data or options.rows or [recipe.global_batch for recipe in recipes if recipe.steps]
    if len(given) != len(recipes):
        raise ValueError(
            f"give --data or --rows for each of {len(recipes)} stages: how many steps an epoch has depends on them"
        )
    if options.data:
        for warning in filter(None, (unlike_served_warning(read_json(manifest)) for manifest in options.data)):
            print(one_line(f"WARNING {warning}"), file=sys.stderr)
        return [counted_rows(manifest) for manifest in options.data]
    rows = [whole_rows(number, recipe.data.sequence_length) for number, recipe in zip(given, recipes, strict=True)]
    return [replace(each, are_all=bool(options.rows)) for each in rows]


def main(argv: list[str]) -> int:
    """Print the plan; 0 when every stage fits, 1 when one does not or something is wrong."""
    options = parser().parse_args(argv)
    available, device, rate = int(options.gpu_memory_gib * GIB), torch.device(options.device or "cuda"), options.flops
    plans: list[Plan] = []
    try:
        stages, config = read_stages(options), read_target(options.target)
        rows = read_rows(options, [recipe for recipe, _ in stages])
        if options.device is None and not torch.cuda.is_available():
            print(FOR_GPUS, file=sys.stderr)
        replayed = {name: counted_rows(path) for name, path in options.replay}
        if replayed and len(stages) > 1:
            raise ValueError(f"--replay: is of one stage, these are {len(stages)}; plan the one that replays by itself")
        for (recipe, runtime), own in zip(stages, rows, strict=True):
            plan = plan_stage(config, recipe, runtime, own, options.ranks, device, replayed)
            stored = stored_lines(plan, recipe, runtime, own, options.states_folder, rate * options.ranks)
            if options.states_only:
                print("\n".join([f"stage {recipe.stage}:", *stored]))
            elif not options.json:
                print("\n".join(stage_lines(recipe, plan, rate, available, stored)))
            plans.append(plan)
        if options.json:
            print(json.dumps([needs_of(plan, rate, options.node_gpus, options.longest_job) for plan in plans]))
    except ConfigError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    if options.states_only:
        return 0
    if not options.json:
        hours, disk = sum(plan.hours(rate) for plan in plans), sum(plan.disk for plan in plans)
        print(f"all {len(plans)} stages: {hours:.1f} hours, {gib(disk)} of disk")
    return int(any(peak(estimate(plan.setup)) > available for plan in plans))
