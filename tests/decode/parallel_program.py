"""Run by torchrun: what is decoded with a target that is split over the ranks.

Arguments: a folder for the results, what the ranks' random numbers differ by, and a target's folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from longspec.answers.local import decode
from longspec.chain_length import ChainAcceptance, TreeAcceptance
from longspec.decode.autoregressive import decode_plain
from longspec.decode.generate import generate
from longspec.decode.levels import Budget
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import speculate
from longspec.distributed import end_at_once, find_ranks
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.process_group import join
from tests.decode.models import METHODS, make_drafter

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [8, 9, 7, 9, 3, 2, 3, 8, 4]]
SHAPES = ((4, 0.9), ((2, 3, 2), 0.0))  # with a temperature
NEW = 12


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(target: Any, apart: int = 0) -> dict[str, Any]:
    """Texts by every way to decode, and how much was accepted. apart: what this rank's random numbers differ by."""
    found: dict[str, Any] = {}
    for method in METHODS:
        torch.manual_seed(5)
        drafter = make_drafter(method, target, ids=(0, 2, 3, 4, 5, 7, 8, 9) if method == "glide" else None)
        start = prefill(target, PROMPTS, 8, drafter.reads)
        for given, (shape, temperature) in zip((PROMPTS, start), SHAPES, strict=True):
            options = {"shape": shape, "temperature": temperature, "eos": 10, "max_new_tokens": NEW}
            decoded = speculate(target, drafter, given, **options, generator=generator(11 + apart))
            found[f"{method} {shape}"] = [(row.ids, row.accepted) for row in decoded.rows]
    trees = (TreeAcceptance(0.0, (2, 3), 30, 10), TreeAcceptance(0.0, Budget(5), 90, 10))
    drafter.acceptance = (ChainAcceptance(0.0, ((9, 10), (8, 9))), *trees)
    generated = generate(target, torch.tensor(PROMPTS[:1]), draft=drafter, max_new_tokens=NEW, do_sample=False)
    found["generate"] = generated.tolist()  # in the shape that costs least, by times that each rank took itself
    start = prefill(target, PROMPTS[:1])
    sampler = Sampler(0.9, generator=generator(11 + apart))
    found["plain"] = decode_plain(target, start, NEW, None, sampler).ids
    samplers = [Sampler(0.9, generator=generator(row + apart)) for row in range(len(PROMPTS))]
    found["answers"] = decode(target, PROMPTS, NEW, [10], samplers)
    return found


def main(folder: str, apart: int, path: str) -> None:
    ranks = find_ranks()
    join(ranks, timeout_minutes=2)
    target = load_target(path, read_target_config(path), torch.float64, ranks=ranks.world_size)
    own = sum(parameter.to_local().numel() for parameter in target.parameters() if hasattr(parameter, "to_local"))
    told = {"texts": texts(target, apart * ranks.rank), "split": own}
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    end_at_once(0)
