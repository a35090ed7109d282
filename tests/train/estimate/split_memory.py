"""Under torchrun: what the forward of a target holds that is split over the ranks, as each rank sees it.

Arguments: a folder, in which each rank writes a list of [estimated, measured] bytes, and a target's folder.
"""

import json
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from longspec.config import Runtime
from longspec.distributed import end_at_once, find_ranks
from longspec.models.target_config import read_target_config
from longspec.process_group import join
from longspec.states.load import load_states
from longspec.train.estimate import memory
from longspec.train.estimate.memory import TARGET
from tests.train.estimate.test_memory import CPU, LiveBytes, recipe_of

TOKENS = 2048


def measured(path: str, chunk: int | None, ranks: int) -> tuple[int, int]:
    config, recipe = read_target_config(path), recipe_of()
    recipe.data.sequence_length = TOKENS
    runtime = OmegaConf.structured(Runtime(target="tensor_parallel", target_chunk=chunk, attention="sdpa"))
    setup = memory.setup_of(config, recipe, runtime, 1, ranks, torch.float32, CPU)
    states = load_states(path, config, runtime, CPU, torch.float32)
    weights = [part.to_local() if isinstance(part, DTensor) else part for part in states.target.parameters()]
    ids, positions = torch.arange(TOKENS)[None] % config.vocab_size, torch.arange(TOKENS)[None]
    with LiveBytes(weights) as live:
        states(ids, positions, None, [tensor.name for tensor in setup.reads])
    return sum(item.bytes for item in memory.target_items(setup) if item.phase == TARGET), live.peak


def main(folder: str, path: str) -> None:
    ranks = find_ranks()
    join(ranks, timeout_minutes=2)
    told = [measured(path, chunk, ranks.world_size) for chunk in (None, 512)]
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_at_once(0)
