"""Tokens a round by how much a draft was trained on: python benchmarks/data_amount.py [run ...]

After `make smollm2` with `keep_states: true` in config/workflow.yaml (default run: smollm2-eagle3). A draft for each part of
the stage's rows, drawn at random, each part in the next larger one, trained by the run's own recipe: as many epochs, so that
half of the rows are half of the steps. All draft the same 48 whole questions on held-out modules, greedily, by chains of three
and by trees of sixteen by a budget. A part is a line of results/data_amount.jsonl as soon as it is measured; the same command
goes on behind the last, and in a training from its last checkpoint. No bars: what data buys. Intervals over questions, the gain
on the next smaller part paired.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from benchmarks.cells import Cell, fill
from benchmarks.real_llm import CONTEXT, NEW, PROMPTS, QUESTIONS, SEED, TARGET, THREADS, rounded
from longspec.atomic_files import read_json, sha256_file
from longspec.data.schedule import Schedule, TrainedRows
from longspec.decode.generate import load_drafter
from longspec.decode.levels import Budget
from longspec.decode.speculate import speculate
from longspec.decode.texts import ends_of_text
from longspec.measure.estimates import estimate
from longspec.measure.prompts import draw_prompts
from longspec.measure.tasks import HeldOut
from longspec.models.target import load_target, resolve_dtype
from longspec.models.target_config import read_target_config
from longspec.train import __main__ as trainer

PARTS = (8, 4, 2, 1)  # one row of so many
SHAPES = {"chain of three": 3, "tree of sixteen": Budget(16)}
CELLS = machine.RESULTS / "data_amount.jsonl"


class Part(Schedule):
    """The order of a part of a single data set's rows."""

    rows_N: Any

    def batch(self, step: int) -> Any:
        return self.rows_N[super().batch(step)]


def train_a_part(part: int, arguments: list[str]) -> None:
    """Train on one row of `part`, as the trainer's own command line says; ends this process."""

    def schedule(rows: TrainedRows, shares: list[float], global_batch_size: int, seed: int) -> Schedule:
        rows_N = np.random.default_rng(0).permutation(len(rows))[: len(rows) // part]
        made = Part([len(rows_N)], [1.0], global_batch_size, seed)
        made.rows_N = rows_N
        return made

    TrainedRows.schedule = schedule  # type: ignore[method-assign]
    sys.argv = ["train", *arguments]
    trainer.main()


def draft_of(run: str, part: int) -> tuple[Path, Path]:
    """The draft of a part and its stage's checkpoint.json, trained if they are not there; of all rows the run's own."""
    [final] = Path("results", run).glob("*/final_draft")
    stage = final.parent / read_json(final / "config.json")["stage"]
    if part == 1:
        return final, stage / "checkpoint.json"
    log = Path("logs/train", *stage.parts[1:]).with_suffix(".log")
    given = shlex.split(log.read_text().splitlines()[0].partition(" -m longspec.train ")[2])
    out = machine.WORK / f"data_amount/{run}-{part}-{sha256_file(final / 'training_config.yaml')[:16]}"
    given[given.index("--out") + 1] = str(out)
    if not (out / "checkpoint.json").exists():
        subprocess.run([sys.executable, __file__, "--part", str(part), *given], check=True)
    for name in ("recipe.yaml", "runtime.yaml"):
        shutil.copy(stage / name, out / name)
    named = [name for name in ("--target", "--data", "--vocabulary") if name in given]
    files = [word for name in named for word in (name, given[given.index(name) + 1])]
    extract = [sys.executable, "-m", "longspec.draft", "extract", str(out / "checkpoint.json"), "--out", str(out / "draft")]
    subprocess.run([*extract, *files], check=True)
    return out / "draft", out / "checkpoint.json"


@torch.inference_mode()
def measured(which: Cell) -> Cell:
    """Train and measure a part: by shape the tokens and rounds of each question."""
    torch.set_num_threads(THREADS)
    draft, checkpoint = draft_of(which["run"], which["part"])
    path = read_json(TARGET)["path"]
    target: Any = load_target(path, read_target_config(path), resolve_dtype("fastest"))
    task = HeldOut("", CONTEXT, NEW, whole_questions=True)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompts = draw_prompts("held out", task, QUESTIONS, PROMPTS, tokenizer, SEED)
    drafter, found, eos = load_drafter(target, draft), dict[str, Any](), ends_of_text(target, tokenizer)
    for name, shape in SHAPES.items():
        rows = [speculate(target, drafter, [each.ids], max_new_tokens=NEW, shape=shape, eos=eos).rows[0] for each in prompts]
        sums = [sum(row.accepted) + len(row.accepted) for row in rows], [len(row.accepted) for row in rows]
        found[name] = rounded(estimate(sums)) | dict(zip(("tokens", "rounds"), sums, strict=True))
    trained = {name: read_json(checkpoint)[name] for name in ("step", "tokens_seen", "training_seconds")}
    return {"processor": machine.describe(())["processor"], "trained": trained, "shapes": found}


def main() -> None:
    """Fill the cells and tell them, each with its gain on the part before."""
    if sys.argv[1:2] == ["--part"]:
        train_a_part(int(sys.argv[2]), sys.argv[3:])
    for run in sys.argv[1:] or ["smollm2-eagle3"]:
        [recipe] = Path("results", run).glob("*/final_draft/training_config.yaml")  # parts of another recipe do not compare
        cells = fill(CELLS, [{"run": run, "part": part, "recipe": sha256_file(recipe)[:16]} for part in PARTS], measured)
        for before, cell in zip([None, *cells], cells, strict=False):
            for name, own in cell["shapes"].items():
                told = {key: own[key] for key in ("mean", "low", "high")}
                if before is not None:
                    other = before["shapes"][name]
                    told["gain"] = rounded(estimate((own["tokens"], own["rounds"]), (other["tokens"], other["rounds"])))
                print(run, f"1/{cell['part']}", name, json.dumps(told))


if __name__ == "__main__":
    main()
