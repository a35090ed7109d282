"""Which numbers are possible, for every field that is one, and which words.

A bound is where a value has no meaning any more (no target has 2**24 positions, no job lasts a year), not where it is unwise.
Not a number (.nan) and infinity (.inf) lie in no range.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Range:
    """Allowed numbers, from `low` to `high`; `open_low`, `open_high`: that bound itself is not allowed."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in it."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        return f"{'above' if self.open_low else 'from'} {self.low} {'to below' if self.open_high else 'to'} {self.high}"


MANY = 10**9
SHARE = Range(0, 1)
REPLAYED = Range(0, 1, open_low=True, open_high=True)  # of recipe.data.replay, each share
TOKENS = Range(1, 2**24)  # of a row, a window, a batch: no target has so many positions
COUNT = Range(1, MANY)
SIZE = Range(1, 2**20)  # of a layer of a small target
RATE = Range(0, 1, open_low=True)
SEED = Range(0, 2**63 - 1)  # torch takes no larger one, and numpy none below 0
YEAR_MINUTES = 365 * 24 * 60

RECIPE = {
    "data.sequence_length": Range(2, TOKENS.high),  # one token alone has no next one to learn
    "optimizer.lr": RATE,
    "optimizer.betas": Range(0, 1, open_high=True),
    "optimizer.eps": RATE,
    "optimizer.weight_decay": Range(0, 10),
    "optimizer.warmup_ratio": SHARE,
    "optimizer.clip": Range(0, 10**6),
    "global_batch": TOKENS,
    "epochs": Range(1, 10**6),
    "steps": COUNT,
    "seed": SEED,
    "states.top_k": TOKENS,
}
RUNTIME = {
    "micro_batch": TOKENS,
    "save_every": COUNT,
    "log_every": COUNT,
    "target_chunk": TOKENS,
    "ranks": COUNT,
    "held_out_every": Range(0, MANY),
    "held_out_rows": COUNT,
    "timeout_minutes": Range(1, YEAR_MINUTES),
    "watchdog_seconds": Range(1, 60 * YEAR_MINUTES),
    "stop_margin_seconds": Range(0, 60 * YEAR_MINUTES),
    "max_skipped_in_a_row": COUNT,
    "peak_tflops": Range(0, 10**6, open_low=True),
    "deepspeed.zero_stage": Range(0, 3),
}
BUILD = {
    "vocabulary": Range(256 + 3, 2**24),  # the bytes and the special tokens
    "hidden": SIZE,
    "layers": SIZE,
    "heads": SIZE,
    "key_value_heads": SIZE,
    "intermediate": SIZE,
    "max_position": TOKENS,
    "rope_theta": Range(0, 10**12, open_low=True),
    "lr": RATE,
    "warmup_ratio": SHARE,
    "seed": SEED,
}
PHASE = {"sequence_length": RECIPE["data.sequence_length"], "rows": TOKENS, "steps": COUNT}  # of build.mixture


def number_fields(schema: type, prefix: str = "") -> dict[str, bool]:
    """The fields of a section that are numbers or lists of these, by their place in it; whether each may be null."""
    found: dict[str, bool] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        kind = hints[field.name]
        if is_dataclass(kind):
            found |= number_fields(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif get_origin(kind) is not dict and {int, float} & {kind, *get_args(kind)}:
            found[prefix + field.name] = type(None) in get_args(kind)
    return found


def check_numbers(section: Any, schema: type, name: str, ranges: dict[str, Range]) -> None:
    """Raise ValueError, with the key below `name`, for a number of a section of this schema that lies outside its range."""
    for place, nullable in number_fields(schema).items():
        check_number(f"{name}.{place}", OmegaConf.select(section, place), ranges[place], nullable=nullable)


def check_number(key: str, value: Any, allowed: Range, *, nullable: bool = False) -> None:
    """Raise ValueError, with the key, for one number outside its range; of a list each must lie in it."""
    if value is None and nullable:
        return
    for number in value if OmegaConf.is_list(value) else [value]:
        if not allowed.holds(number):
            raise ValueError(f"{key}: must be a number {allowed}{', or null' if nullable else ''}, is {number}")


def check_choices(section: DictConfig, name: str, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError, with the key, for a word that is none of its field's."""
    for place, known in choices.items():
        value = OmegaConf.select(section, place)
        if value not in known:
            raise ValueError(f"{name}.{place}: {value!r} is unknown; choose one of {', '.join(known)}")
