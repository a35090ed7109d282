"""Checks before decoding: targets, drafters and prompts that would give a wrong text or a crash are refused."""

from typing import Any

import torch

from longspec.decode.drafters import Drafter
from longspec.families import check_target
from longspec.models.target import draft_device
from longspec.models.tensor_parallel import check_splits, group_of


def check_decodable(target: Any, generator: torch.Generator | None = None) -> None:
    """Raise ValueError for a target that has no weights or would not give its own text, and for a generator elsewhere."""
    check_target(target.config, target.config.name_or_path or "target")
    if (group := group_of(target)) is not None:
        check_splits(target.config, group.size(), target.config.name_or_path or "target")
    if "meta" in (target.device.type, target.lm_head.weight.device.type):
        raise ValueError(
            "target: its weights are on meta, where there are no numbers: load it on a CPU or a GPU; by device_map at least "
            "model.embed_tokens and lm_head, which drafts read too"
        )
    if generator is not None and generator.device != (device := draft_device(target)):
        raise ValueError(f"generator: is on {generator.device}, tokens are drawn on {device}: torch.Generator('{device}')")


def check_drafter(drafter: Any, target: Any) -> None:
    """Raise ValueError for what is no drafter, or one that was made for another target."""
    if not isinstance(drafter, Drafter):
        raise ValueError(f"draft: {drafter!r}: give a draft folder, a weight file, or a drafter as of load_drafter")
    drafter.check(target)


def check_prompts(prompts: list[list[int]], vocabulary: int) -> None:
    """Raise ValueError for a prompt without a token and for ids outside the vocabulary."""
    if not prompts or not all(prompts):
        raise ValueError("prompts: each needs a token at least; give the bos token where there is no text")
    for row, prompt in enumerate(prompts):
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            place, token = next((place, token) for place, token in enumerate(prompt) if not 0 <= token < vocabulary)
            raise ValueError(
                f"prompts: row {row}, token {place}: {token} lies outside 0..{vocabulary - 1}, the target's vocabulary; use "
                "the target's own tokenizer"
            )
