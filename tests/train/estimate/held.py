"""Under torchrun: what DeepSpeed holds for each way of sharing, as rank 0 sees it: `... -m tests.train.estimate.held OUT`.

Writes a list of [zero stage, offload, dtype, parameters, {dtype: {bytes of a tensor: how many at most at once}}].
"""

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.config import Runtime, compose
from longspec.distributed import end_at_once, find_ranks
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Qwen2Glide
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.engine import boot, build_engine

CASES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")]


def storages() -> dict[int, tuple[str, torch.UntypedStorage]]:
    """Every tensor's memory that Python knows of: address -> dtype and storage; none is freed while the result is kept."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.layout == torch.strided and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage._cdata] = (str(thing.dtype), storage)
    return found


def since(before: dict[int, tuple[str, torch.UntypedStorage]]) -> Counter[tuple[str, int]]:
    """(dtype, bytes) of what is there beside `before`, whose addresses are no one else's as long as it is kept."""
    return Counter((name, storage.nbytes()) for address, (name, storage) in storages().items() if address not in before)


def held(stage: int, offload: str, dtype: torch.dtype) -> tuple[int, Counter[tuple[str, int]]]:
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    states = TargetStates(target.requires_grad_(False).eval())
    before = storages()
    glide = Qwen2Glide(config, "", draft=Draft(anchors="off", lag_mode="fixed"), states=states)
    parameters = sum(parameter.numel() for parameter in glide.parameters())
    runtime = OmegaConf.structured(Runtime())
    runtime.deepspeed.zero_stage, runtime.deepspeed.offload_optimizer = stage, offload
    engine = build_engine(glide, compose("train", ["run=demo"]).recipe, runtime, (1, 1), 10, dtype)
    ids = torch.arange(32)[None]
    most: Counter[tuple[str, int]] = Counter()
    for _ in range(2):
        engine.backward(engine(ids, ids, lag=2).loss)
        most |= since(before)
        engine.step()
        most |= since(before)
    engine.destroy()
    return parameters, most


def main(out: Path) -> None:
    ranks = find_ranks()
    boot(ranks, 5)
    rows = []
    for stage, offload in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            parameters, most = held(stage, offload, dtype)
            sizes: dict[str, dict[int, int]] = {}
            for (name, size), count in most.items():
                sizes.setdefault(name, {})[size] = count
            rows.append([stage, offload, str(dtype), parameters, sizes])
    if ranks.is_main:
        out.write_text(json.dumps(rows))
    end_at_once(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
