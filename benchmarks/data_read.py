"""Reading batches against what a train step of the demo needs: python benchmarks/data_read.py

Batches come as the trainer takes them: the sampler's rows for any step, their random draws, tensors. A step's own speed is
what the demo measured when it was trained on this machine (`make demo` first), by stage.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import corpora
import machine
import torch
from omegaconf import OmegaConf

from longspec.data import tokenize
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.train.micro_batches import StepBatches

BAR = 20
STEPS = 200
KINDS = {"base": "texts", "long": "texts", "longcot": "chats"}
POSITIONS = 32768


def trained(folder: Path) -> float:
    """Tokens per second of a stage of the demo, in the median over its steps."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(step["tokens"] / step["seconds"] for step in steps)


def rows_of(kind: str, length: int) -> PackedRows:
    """Packed rows of a dataset."""
    tokens = machine.WORK / "read" / kind / "000.json"
    if not tokens.is_file():
        tokenize.make(corpora.raw_manifest(kind), corpora.tokenizer_manifest(), 0, 1, tokens)
    out = machine.WORK / "read" / f"{kind}-{length}" / "manifest.json"
    packing.make([tokens], length, "base", "split", out)
    return PackedRows(out)


def read(rows: PackedRows, recipe: Any) -> float:
    """Tokens per second of reading alone, steps far apart so that no order helps."""
    batches = StepBatches(TrainedRows(rows), recipe, recipe.global_batch, Ranks(0, 0, 1), POSITIONS)
    began = time.perf_counter()
    for step in range(STEPS):
        for numbers in batches.micro_batches(step * 7):
            batches.load(step, numbers)
            batches.num_labels(step)
    return STEPS * recipe.global_batch * rows.sequence_length / (time.perf_counter() - began)


def main() -> None:
    """Every stage of the demo."""
    folders = sorted(path.parent for path in (machine.ROOT / "results/demo").glob("*/*/metrics.jsonl"))
    if not folders:
        raise SystemExit("error: results/demo holds no trained stage; run `make demo` first")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    numbers: dict[str, Any] = {"machine": machine.describe(("torch", "pyarrow", "numpy")), "bar": BAR, "stages": {}}
    for folder in folders:
        recipe = OmegaConf.load(folder / "recipe.yaml")
        rows = rows_of(KINDS[folder.name], recipe.data.sequence_length)
        speeds = {"read": statistics.median(read(rows, recipe) for _ in range(3)), "trained": trained(folder)}
        numbers["stages"][folder.name] = speeds | {"times": speeds["read"] / speeds["trained"]}
        print(folder.name, {name: round(speed) for name, speed in numbers["stages"][folder.name].items()}, flush=True)
    numbers["holds"] = all(stage["times"] >= BAR for stage in numbers["stages"].values())
    machine.write("data_read", numbers)


if __name__ == "__main__":
    main()
