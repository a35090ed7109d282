"""Training from stored states, against training beside the target: building, a step, and three epochs of each.

    python benchmarks/offline_states.py                      GLIDE and EAGLE-3 on the demo's target (`make demo` first)
    python benchmarks/offline_states.py --quick --rows 2     fewer rows, nothing kept

On another target, such as SmolLM2-135M in a folder T, with rows packed for it in P:

    python -m longspec.target fetch --source T --out-target P/target_manifest.json --out-tokenizer P/tokenizer_manifest.json
    python -m longspec.data raw --name puzzles --settings '{"source": "puzzles", "records": 400, "held_out": 0.02}' \\
        --out P/raw/manifest.json
    python -m longspec.data tokenize --raw P/raw/manifest.json --tokenizer P/tokenizer_manifest.json --out P/tokens/000.json
    python -m longspec.data pack --tokens P/tokens/000.json --length 512 --collation longcot --out P/manifest.json
    python benchmarks/offline_states.py --target P/target_manifest.json --data P/manifest.json --name smollm \\
        --more-rows 12 --vocabulary 8192 recipe.model.family=llama

With T the seconds of the bare target's forward over some rows, which yields what the draft reads, and D those of the draft's
own step over them (forward, losses, backward, optimizer, the states lying in memory), both taken here:

    building     T / seconds of building the states: with rows read, written, synced, and some computed again   bar 0.85
    step         seconds of steps from files / D                                                                bar 1.3
    three epochs seconds online / offline, building included, as a share of 3 (T + D) / (T + 3 D)               bar 0.75

All is done in turns in one process, on one thread, with models that are loaded; of T, building, D and the steps the least of
some repeats counts. Building is taken over more rows than steps are, since a shard computes one row in 256 again, and at least
one. Kept in benchmarks/results/offline_states_{name}.json.
"""

import argparse
import itertools
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import ROOT, WORK, describe, write
from longspec.atomic_files import read_json, write_json
from longspec.config import compose
from longspec.data import draft_vocabulary
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.draft_vocabulary import DraftVocabulary
from longspec.families import position_limit
from longspec.methods import method_of, vocabulary_for, vocabulary_size
from longspec.states.build import Computation, build
from longspec.states.declaration import RowSource, bytes_a_token
from longspec.states.load import Place, StoredStates
from longspec.train.micro_batches import ReadAhead, StepBatches, changed

BUILDING, STEP, EPOCHS = 0.85, 1.3, 0.75
ONE = Ranks(0, 0, 1)
OFFLINE = ["recipe.states.source=offline", "recipe.global_batch=1", "runtime.micro_batch=1", "runtime.held_out_every=0"]
METHODS = {
    "glide": ["run=demo", "stage=long", "recipe.draft.anchors=off"],
    "eagle3": ["run=demo-eagle3", "stage=long", "recipe.method.vocabulary_from=null"],
}


class RowByRow(StepBatches):
    """Step r trains row r."""

    def micro_batches(self, step: int) -> list[np.ndarray]:
        """The row's number."""
        return [np.array([step])]


@dataclass
class Bench:
    """One method beside the target, and beside its stored states."""

    recipe: Any
    computation: Computation
    vocabulary: DraftVocabulary | None
    source: RowSource
    rows: range  # that are trained on
    more_rows: range  # whose building is timed
    device: torch.device

    def __post_init__(self) -> None:
        positions = position_limit(self.computation.config)
        self.batches = RowByRow(TrainedRows(self.source.rows), self.recipe, 1, ONE, positions)

    def trainer(self, states: Any) -> Any:
        """A fresh draft beside states."""
        method, settings = method_of(self.recipe, self.vocabulary)
        torch.manual_seed(0)
        return method.trainer(states, settings, None).to(self.device)

    def bare(self, rows: range) -> None:
        """The target's forward alone."""
        for batch in [self.source.batch([row]) for row in rows]:
            parts = [None if part is None else part.to(self.device) for part in batch]
            self.computation.states(*parts, self.computation.names)
        self.wait()

    def build(self, folder: Path, rows: range) -> list[Place]:
        """Build the states of the first rows anew."""
        shutil.rmtree(folder, ignore_errors=True)
        places = []
        for name in read_json(build(folder, self.computation, rows, ONE))["parts"]:
            first, last = map(int, re.findall(r"\d+", name)[:2])
            places += [(folder / name, row - first) for row in range(first, last + 1)]
        return places

    def steps(self, trainer: Any) -> Callable[[], None]:
        """A training step of each row, which is read ahead, as the trainer's states are where they are stored."""
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-5, fused=True)
        reader = ReadAhead(self.batches, trainer.states, itertools.cycle(self.rows), self.device)

        def run() -> None:
            for _ in self.rows:
                trainer(**reader.take(), num_labels=2048).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            self.wait()

        return run

    def wait(self) -> None:
        """Until the GPU, where there is one, is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class InMemory(torch.nn.Module):
    """States that were read once and stay in memory."""

    def __init__(self, states: Any, bench: Bench) -> None:
        super().__init__()
        self.states, self.found = states, {}
        for row in bench.rows:
            batch = changed(bench.batches.load(row, np.array([row])), lambda tensor: tensor.to(bench.device))
            names = ("input_ids", "position_ids", "document_ids", "row_numbers")
            ids, positions, documents, number = (batch[name] for name in names)
            self.found[row] = states(ids, positions, documents, [], number)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("states"), name)

    def prefetch(self, _: Any) -> None:
        """All is there."""

    def forward(self, *arguments: Any) -> Any:
        """The states of one row."""
        return self.found[int(arguments[-1])]


def seconds(work: Callable[[], Any]) -> float:
    """Of one run."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(bench: Bench, folder: Path, repeats: int) -> dict[str, Any]:
    """All ratios of one method."""
    rows = bench.build(folder, bench.rows)
    made = bench.computation
    stored = StoredStates(made.target_path, made.config, made.dtype, made.states.attention, rows)
    stored.follow(bench.device)
    beside = bench.steps(bench.trainer(bench.computation.states))
    from_files = bench.steps(bench.trainer(stored))
    own = bench.steps(bench.trainer(InMemory(stored, bench)))
    more = bench.more_rows
    turns: dict[str, Callable[[], Any]] = {"T": lambda: bench.bare(bench.rows), "D": own, "step": from_files, "online": beside}
    turns |= {"bare": lambda: bench.bare(more), "building": lambda: bench.build(folder.with_name("more"), more)}
    for name in ("T", "D", "step", "online"):  # once before it counts
        turns[name]()
    taken = [{name: seconds(work) for name, work in turns.items()} for _ in range(repeats)]
    least = {name: min(each[name] for each in taken) for name in turns}
    online = seconds(lambda: [beside() for _ in range(3)])
    offline = seconds(lambda: [bench.build(folder, bench.rows), *(from_files() for _ in range(3))])
    told = 3 * (least["T"] + least["D"]) / (least["T"] + 3 * least["D"])
    ratios = {
        "building": least["bare"] / least["building"],
        "step": least["step"] / least["D"],
        "three_epochs": online / offline,
        "three_epochs_told": told,
        "three_epochs_share": online / offline / told,
    }
    tokens = len(bench.rows) * bench.source.sequence_length
    sizes = {"tokens": tokens, "bytes_a_token": bytes_a_token(made.stored)}
    return sizes | {"ratios": ratios, "seconds": least | {"online_3_epochs": online, "offline_3_epochs": offline}}


def bench_of(options: argparse.Namespace, name: str, target: Path, data: Path) -> Bench:
    """One method's recipe on a target and packed rows."""
    packed = PackedRows(data)
    shape = [f"recipe.data.{key}={packed.manifest[key]}" for key in ("sequence_length", "collation", "overlong")]
    chosen = [*METHODS[name], *OFFLINE, *shape, f"recipe.states.dtype={options.dtype}", *options.overrides]
    chosen += [f"recipe.method.vocabulary={options.vocabulary}"] if name == "eagle3" else []
    config = compose("train", chosen)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, vocabulary = RowSource(packed), None
    computation = Computation(config.recipe, config.runtime, target, source, None, device)
    size = vocabulary_size(config.recipe)
    if size is not None:
        path = WORK / "offline_states/draft_vocabulary.json"
        draft_vocabulary.make({"rows": data}, target, size, None, path)
        vocabulary = vocabulary_for(config.recipe, path)
    rows = [range(min(number, len(source.rows))) for number in (options.rows, options.more_rows)]
    return Bench(config.recipe, computation, vocabulary, source, *rows, device)


def main() -> None:
    """Measure both methods, hold them against the bars, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="target_manifest.json, or the folder of a target; default: the demo's")
    parser.add_argument("--data", type=Path, default=ROOT / "data/packed/demo/puzzles-longcot-2048-split/manifest.json")
    parser.add_argument("--name", default="demo")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtype", default="bfloat16", help="recipe.states.dtype")
    parser.add_argument("--vocabulary", type=int, default=768, help="tokens that an EAGLE-3 draft can propose")
    parser.add_argument("--rows", type=int, default=4, help="that are trained on")
    parser.add_argument("--more-rows", type=int, default=48, help="whose building is timed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="keep nothing")
    parser.add_argument("overrides", nargs="*", help="of the recipes, such as recipe.model.family=llama")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = options.target or ROOT / "models/demo/target_manifest.json"
    if target.is_dir():
        folder, target = target, WORK / "offline_states/target_manifest.json"
        write_json(target, {"path": str(folder), "files": {}})
    found: dict[str, Any] = {}
    for name in options.methods:
        bench = bench_of(options, name, target, options.data)
        found[name] = measure(bench, WORK / "offline_states/states", options.repeats)
        ratios = found[name]["ratios"]
        found[name]["passed"] = (
            ratios["building"] >= BUILDING and ratios["step"] <= STEP and ratios["three_epochs_share"] >= EPOCHS
        )
        print(name, {key: round(value, 3) for key, value in ratios.items()}, "passed" if found[name]["passed"] else "FAILED")
    bars = {"building": BUILDING, "step": STEP, "three_epochs_share": EPOCHS}
    machine = describe(("torch", "transformers"))
    if not options.quick:
        write(f"offline_states_{options.name}", {"dtype": options.dtype, "bars": bars, "methods": found, "machine": machine})


if __name__ == "__main__":
    main()
