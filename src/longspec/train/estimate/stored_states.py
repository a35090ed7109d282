"""What stored states cost and save: disk, operations of building them, and how much sooner a stage of E epochs ends.

With T the operations of the target's forward over all rows and D those of the draft's steps over them (the products with the
head among them), E epochs cost E (T + D) online and T + E D offline.
"""

import shutil
from pathlib import Path
from typing import Any

from longspec.config import OFFLINE, Recipe, Runtime, States
from longspec.states.stored.declaration import bytes_a_token, stored_tensors
from longspec.train.estimate import flops
from longspec.train.estimate.memory import Setup
from longspec.train.estimate.memory_check import gib


def speed_up(target: float, draft: float, epochs: float) -> float:
    """Return how many times faster than online so many epochs are, building included, by T and D."""
    return epochs * (target + draft) / (target + epochs * draft)


def stored_lines(
    setup: Setup, recipe: Recipe, runtime: Runtime, rows: Any, epochs: float, folder: Path, rate: float
) -> list[str]:
    """Return the plan's lines on stored states; none of a stage that is trained online.

    rows: the stage's own, as of plan.Rows; folder: where the states are to lie; rate: operations a second of all ranks.
    """
    if recipe.states.source != OFFLINE:
        return []
    if not rows.are_all:
        return ["  stored states: their disk and hours are told with --data or --rows"]
    method, length, states = setup.method, setup.sequence_length, recipe.states

    def token_bytes(*, held_out: bool) -> int:
        reads = method.reads(setup.config, setup.settings, with_llm_loss=held_out)
        return bytes_a_token(stored_tensors(reads, states.dtype, states.top_k))

    def operations(states: States) -> flops.Operations:
        counted = (rows.sampled * length, rows.documents, rows.labels, states)
        return flops.operations(setup.config, method, setup.settings, *counted, with_llm_loss=False)

    offline, all_rows = operations(states), rows.number / rows.sampled
    target, draft = operations(States()).target * all_rows, (offline.draft + offline.head) * all_rows
    held_out = runtime.held_out_rows if runtime.held_out_every else 0
    disk = length * (rows.number * token_bytes(held_out=False) + held_out * token_bytes(held_out=True))
    place = folder.resolve()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.is_dir())).free
    room = f"{gib(free)} free at {folder}"
    if disk > free:
        room = (
            f"DOES NOT FIT: {room}; states_folder in config/workflow.yaml puts them on another disk, recipe.states.dtype: "
            "float8 and recipe.states.top_k make them smaller"
        )
    top = "" if states.top_k is None else f", the {states.top_k} likeliest tokens"
    return [
        f"  stored states: {token_bytes(held_out=False):,} bytes a token ({states.dtype}{top}), {gib(disk)} of {rows.number:,} "
        f"rows and {held_out} held-out ones; {room}",
        f"  building them: {target:.3g} operations, {target / rate / 3600:.2g} hours at {rate / 1e12:.3g} TFLOP/s",
        f"  {epochs:.3g} epochs from them are up to {speed_up(target, draft, epochs):.2f} times as fast as online, building "
        "included",
    ]
