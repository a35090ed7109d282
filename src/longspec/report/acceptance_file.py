"""Write the acceptance file of a final draft: decoding chooses its chains and trees by it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from longspec.chain_length import Acceptance, TreeAcceptance, pooled, write_acceptance
from longspec.config.names import LOOKUP, WITH_LOOKUP
from longspec.engines import OURS
from longspec.measure.lines import Evaluation
from longspec.measure.tasks import Setting, Settings
from longspec.report.inputs import Variant


def longest_chains(settings: list[Setting]) -> list[Setting]:
    """Return the longest measured chain of each temperature; its figures cover all shorter ones."""
    chains = sorted((setting for setting in settings if isinstance(setting.shape, int)), key=lambda setting: setting.depth)
    return [longest for _, longest in sorted({setting.temperature: setting for setting in chains}.items())]


def store_acceptance(folder: Path, variant: Variant, settings: Settings) -> None:
    """Write to the final draft's folder how often its chains were kept, and the tokens per round of each tree."""
    final = variant.evaluations[variant.final]
    held: list[Acceptance] = [
        pooled(setting.temperature, [line["positions"] for line in final.by_setting[setting]])
        for setting in longest_chains(settings.settings)
    ]
    held += _trees(final, [setting for setting in settings.settings if not isinstance(setting.shape, int)])
    if WITH_LOOKUP in variant.evaluations:
        held += _trees(variant.evaluations[WITH_LOOKUP], settings.settings, settings.with_lookup or 0)
    # Prompt lookup copies as many tokens as the shape is deep; other engines do so by their own rules, which ours does not use.
    if LOOKUP in variant.evaluations and settings.engine == OURS:
        for setting in settings.settings:
            found = _trees(variant.evaluations[LOOKUP], [setting])
            held += [replace(each, levels=(), copied=setting.depth) for each in found]
    if held:
        write_acceptance(folder / "final_draft", held)


def _trees(found: Evaluation, settings: list[Setting], copied: int = 0) -> Iterator[TreeAcceptance]:
    """Yield the tokens and rounds of a drafter at each of these settings."""
    for setting in settings:
        tokens, rounds = (sum(line[name] for line in found.by_setting[setting]) for name in ("new_tokens", "rounds"))
        levels = (1,) * setting.shape if isinstance(setting.shape, int) else setting.shape
        if rounds:
            yield TreeAcceptance(setting.temperature, levels, tokens, rounds, copied)
