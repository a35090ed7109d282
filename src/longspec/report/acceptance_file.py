"""The acceptance that is left beside a final draft: decoding chooses its chains and trees by it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspec.chain_length import Acceptance, TreeAcceptance, pooled, write_acceptance
from longspec.config.names import LOOKUP, WITH_LOOKUP
from longspec.engines import OURS
from longspec.measure.tasks import Setting, Settings, shape_name
from longspec.report.inputs import Variant

Line = dict[str, Any]


def longest_chains(settings: list[Setting]) -> list[Setting]:
    """Return the longest chain that was measured at each temperature, which tells of all shorter ones."""
    chains = sorted((setting for setting in settings if isinstance(setting.shape, int)), key=lambda setting: setting.depth)
    return [longest for _, longest in sorted({setting.temperature: setting for setting in chains}.items())]


def store_acceptance(folder: Path, variant: Variant, settings: Settings) -> None:
    """Leave in the final draft's folder how often its chains were kept, and what rounds with each tree brought."""
    held: list[Acceptance] = [
        pooled(setting.temperature, [line["positions"] for line in _lines(variant, setting)])
        for setting in longest_chains(settings.settings)
    ]
    held += _trees(variant, [setting for setting in settings.settings if not isinstance(setting.shape, int)])
    if WITH_LOOKUP in variant.evaluations:
        held += _trees(variant, settings.settings, WITH_LOOKUP, settings.with_lookup or 0)
    # It copies as many tokens as the shape is deep; another engine has a rule of its own, by which ours does not decode.
    if LOOKUP in variant.evaluations and settings.engine == OURS:
        for setting in settings.settings:
            held += [replace(each, levels=(), copied=setting.depth) for each in _trees(variant, [setting], LOOKUP)]
    if held:
        write_acceptance(folder / "final_draft", held)


def _trees(variant: Variant, settings: list[Setting], drafter: str = "", copied: int = 0) -> Iterator[TreeAcceptance]:
    """Yield what a drafter's rounds brought at these settings; "": the final draft."""
    for setting in settings:
        lines = _lines(variant, setting, drafter)
        tokens, rounds = (sum(line[name] for line in lines) for name in ("new_tokens", "rounds"))
        levels = (1,) * setting.shape if isinstance(setting.shape, int) else setting.shape
        if rounds:
            yield TreeAcceptance(setting.temperature, levels, tokens, rounds, copied)


def _lines(variant: Variant, setting: Setting, drafter: str = "") -> list[Line]:
    """Return the lines of a drafter ("": the final draft) at a setting, task by task."""
    lines = variant.evaluations[drafter or variant.final].lines
    wanted = (setting.temperature, shape_name(setting.shape))
    return [line for line in lines if (line["temperature"], shape_name(line["shape"])) == wanted]
