"""What stored states cost, and what they save: disk, operations of building them, and the speed of training from them.

With T the operations of the target's forward over all rows and D those of the draft's steps over them (the products with the
head among them), E epochs cost E (T + D) online and T + E D offline.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.config import OFFLINE, Recipe, Runtime, States
from longspec.methods import method_of
from longspec.states.stored.declaration import bytes_a_token, stored_tensors
from longspec.train.estimate import flops
from longspec.train.estimate.memory_check import gib

REACHED = 0.75  # of the factor: what storing, reading and starting leave of it at least


@dataclass(frozen=True)
class StoredPlan:
    """target, draft: operations T and D over all rows; epochs: E, of the stage; rows, held_out_rows: that are stored."""

    token_bytes: int
    rows: int
    held_out_rows: int
    disk: int
    target: float
    draft: float
    epochs: float

    def factor(self, epochs: float) -> float:
        """How many times faster than online so many epochs are, building included."""
        return epochs * (self.target + self.draft) / (self.target + epochs * self.draft)

    @property
    def pays_from(self) -> int | None:
        """The fewest whole epochs of which offline is faster though it reaches REACHED of the factor; None: there are none.

        REACHED factor(E) > 1 is E (REACHED (T + D) - D) > T.
        """
        saved = REACHED * (self.target + self.draft) - self.draft
        return None if saved <= 0 else math.floor(self.target / saved) + 1


def stored_plan(config: Any, recipe: Recipe, runtime: Runtime, counted: Any, epochs: float) -> StoredPlan:
    """The figures of a stage with recipe.states.source offline; counted: its rows, as of plan.Rows."""
    method, settings = method_of(recipe)
    length, share = recipe.data.sequence_length, counted.number / counted.sampled

    def token_bytes(*, held_out: bool) -> int:
        reads = method.reads(config, settings, with_llm_loss=held_out)
        return bytes_a_token(stored_tensors(reads, recipe.states.dtype, recipe.states.top_k))

    def operations(states: States) -> flops.Operations:
        tokens = counted.sampled * length
        return flops.operations(
            config, method, settings, tokens, counted.documents, counted.labels, states, with_llm_loss=False
        )

    online, offline = operations(States()), operations(recipe.states)
    held_out = runtime.held_out_rows if runtime.held_out_every else 0
    disk = length * (counted.number * token_bytes(held_out=False) + held_out * token_bytes(held_out=True))
    return StoredPlan(
        token_bytes=token_bytes(held_out=False),
        rows=counted.number,
        held_out_rows=held_out,
        disk=disk,
        target=online.target * share,
        draft=(offline.draft + offline.head) * share,
        epochs=epochs,
    )


def stored_lines(plan: StoredPlan | None, recipe: Recipe, folder: Path, rate: float) -> list[str]:
    """Lines of the plan on stored states, their disk and hours; folder: where they are to lie; rate: operations a second.

    Nothing of a stage that is trained online; plan None: its rows are not counted.
    """
    if recipe.states.source != OFFLINE:
        return []
    if plan is None:
        return ["  stored states: their disk and hours are told with --data or --rows"]
    place = folder.resolve()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.is_dir())).free
    room = f"{gib(free)} free at {folder}"
    if plan.disk > free:
        room = (
            f"DOES NOT FIT: {room}; states_folder in config/workflow.yaml puts them on another disk, recipe.states.dtype: "
            "float8 and recipe.states.top_k make them smaller"
        )
    top = "" if recipe.states.top_k is None else f", the {recipe.states.top_k} likeliest tokens"
    pays = "no number of epochs" if plan.pays_from is None else f"{plan.pays_from} epochs"
    return [
        f"  stored states: {plan.token_bytes:,} bytes a token ({recipe.states.dtype}{top}), {gib(plan.disk)} of {plan.rows:,} "
        f"rows and {plan.held_out_rows} held-out ones; {room}",
        f"  building them: {plan.target:.3g} operations, {plan.target / rate / 3600:.2g} hours at {rate / 1e12:.3g} TFLOP/s",
        f"  {plan.epochs:.3g} epochs from them are up to {plan.factor(plan.epochs):.2f} times as fast as online, building "
        f"included; offline pays from {pays} on",
    ]
