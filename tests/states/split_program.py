"""Run by torchrun: losses and gradients beside a target that the ranks share, and beside a whole one.

Arguments: a folder, in which each rank writes its JSON file, how the target is shared, and target folders.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from longspec.config import PARTITIONED, Runtime
from longspec.distributed import end_at_once, find_ranks
from longspec.methods.dflash import method as dflash_method
from longspec.methods.dflash import settings as dflash
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import Settings
from longspec.methods.glide.attach import attach
from longspec.methods.glide.settings import Draft
from longspec.models.target_config import read_target_config
from longspec.states.forward import TargetStates
from longspec.states.load import load_states
from longspec.train.engine import boot

LENGTHS = (9, 1, 12)  # of the documents of packed rows
SIZE, ROWS = sum(LENGTHS), 2
ANCHORS, OFFSET = 4, 60  # of positions as anchors have them


def loaded(path: str, kind: str, dtype: torch.dtype) -> TargetStates:
    runtime = OmegaConf.structured(Runtime(target=kind, attention="sdpa"))
    return load_states(path, read_target_config(path), runtime, torch.device("cpu"), dtype)


def drafts(path: str, states: TargetStates, dtype: torch.dtype) -> dict[str, Any]:
    """The same fresh drafts beside any kind of target."""
    found: dict[str, Any] = {}
    for loss in ("soft", "hard"):
        torch.manual_seed(0)
        draft = Draft(window=7, loss=loss, final_norm=True)
        found[f"glide {loss}"] = attach(path, dtype=dtype, draft=draft, states=states, attention="sdpa")
    torch.manual_seed(0)
    vocabulary = {"vocabulary": 5, "ids": (0, 2, 3, 7, 9), "target_vocabulary": states.config.vocab_size}
    settings = Settings(layers=(0, 1, 2), steps=3, **vocabulary)
    found["eagle3"] = METHOD.trainer(states, settings, None)
    blocks = dflash.Settings(layers=(1, 2), depth=2, block_size=4, **vocabulary)
    found["dflash"] = dflash_method.METHOD.trainer(states, blocks, None)
    return found


def rows_of(rank: int, vocabulary: int) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """The rows of a rank, packed on every second one, and their lags."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(0, vocabulary, (ROWS, SIZE), generator=generator)
    positions = torch.arange(SIZE).repeat(ROWS, 1)
    documents = None
    if rank % 2:
        lengths = torch.tensor(LENGTHS)
        documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths).repeat(ROWS, 1)
        positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(ROWS, 1)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    lags = torch.randint(1, 5, (ROWS,), generator=generator)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": documents}, lags


def step(draft: Any, name: str, rank: int, with_llm_loss: bool) -> dict[str, torch.Tensor]:
    """Losses and gradients of this rank's rows."""
    arguments, lags = rows_of(rank, draft.states.config.vocab_size)
    if name.startswith("glide"):
        arguments["lag"] = lags
        positions = arguments["position_ids"]
        arguments["position_ids"] = positions + (positions >= ANCHORS) * (OFFSET + rank)
    output = draft(**arguments, num_labels=17, with_llm_loss=with_llm_loss)
    output.loss.backward()
    found = {key: value.grad.clone() for key, value in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    found |= {"loss": output.loss.detach()}
    return found | ({} if output.llm_loss is None else {"llm_loss": output.llm_loss, "agreement": output.agreement})


def part_of(parameter: Any) -> torch.Tensor:
    """What a rank holds of a parameter of the target."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)


def compare(path: str, rank: int, shared: str) -> dict[str, Any]:
    """The largest relative difference from a whole target by cases, and how much of the target is held."""
    by_kind, held, dtype = {}, {}, torch.float32 if shared == PARTITIONED else torch.float64
    for kind in ("replicated", shared):
        states, found = loaded(path, kind, dtype), {}
        held[kind] = sum(part_of(parameter).numel() for parameter in states.target.parameters())
        for name, draft in drafts(path, states, dtype).items():
            # Two forwards of each kind: DeepSpeed records their order in the first, and from then on fetches ahead.
            for chunk, with_llm_loss in ((None, True), (None, True), (8, False), (8, False)):
                states.chunk = chunk
                found[f"{name} {chunk}"] = step(draft, name, rank, with_llm_loss)
        by_kind[kind] = found
    (whole, split), differences = by_kind.values(), {}
    for case, wanted in whole.items():
        assert split[case].keys() == wanted.keys()
        apart = [(split[case][key] - value).norm() / value.norm().clamp(min=1e-6) for key, value in wanted.items()]
        differences[case] = float(max(apart))
    losses = {case: float(found["loss"]) for case, found in whole.items()}
    return {"differences": differences, "losses": losses, "held": held}


def main() -> None:
    ranks = find_ranks()
    boot(ranks, 5)
    torch.set_num_threads(1)
    out, shared, *paths = sys.argv[1:]
    Path(out, f"{ranks.rank}.json").write_text(json.dumps([compare(path, ranks.rank, shared) for path in paths]))
    end_at_once(0)


if __name__ == "__main__":
    main()
