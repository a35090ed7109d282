"""What labels of the k likeliest tokens cost in acceptance: the beginning of the demo's first stage, trained on either.

    snakemake compare --config 'runs=[demo,demo-eagle3]'     first: its targets, rows, and recipes are taken
    python benchmarks/top_k_training.py

Each method trains the same rows from the same fresh draft with the target's whole distributions and with k of its tokens, whose
log-probabilities are rounded as they are stored; plain AdamW in this process, with the stage's rates over fewer steps. Kept of
each: acceptance by step of drafting, tokens a round, and the loss against the whole distributions, on held-out rows that all
are measured on; and the mass that the k tokens hold in training.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor

from longspec.config import MUON, Recipe, load
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.families import position_limit
from longspec.methods import method_of, vocabulary_size
from longspec.methods.contract import DraftTrainer
from longspec.models.losses import NO_LABEL
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.declaration import top_k_of
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import FINAL, TOP, TOP_LOG_PROBS
from longspec.train.engine import MuonForMatrices, learning_rate_factor
from longspec.train.micro_batches import StepBatches

STAGES = {"glide": Path("results/demo/sinkpi-slicing/base"), "eagle3": Path("results/demo-eagle3/ttt/base")}
COUNTS = (8, 64, 256)
TARGET = Path("models/demo/target")
HELD_OUT = 16


class TopStates(TargetStates):
    """A target that hands out its k likeliest tokens as files would."""

    def __init__(self, states: TargetStates, k: int, distribution: Any) -> None:
        super().__init__(states.target, attention=states.attention)
        self.k, self.distribution = k, distribution
        self.mass: list[float] = []

    @torch.no_grad()
    def forward(self, input_ids_BS: Tensor, *arguments: Any) -> dict[str, Tensor]:
        """The likeliest tokens in the place of the final hidden states."""
        found = super().forward(input_ids_BS, *arguments)
        ids, next_BS = self.distribution.ids, input_ids_BS.roll(-1, dims=1)
        ids_V = None if ids is None else torch.tensor(ids)
        final_NH = found.pop(FINAL).flatten(0, 1)
        top = top_k_of(final_NH, self.head_weight, self.k, ids_V, self.distribution.temperature, next_BS.flatten())
        made = dict(zip(TOP, top, strict=True))
        self.mass.append(float(made[TOP_LOG_PROBS].exp().sum(-1).mean()))
        made[TOP_LOG_PROBS] = made[TOP_LOG_PROBS].half()
        return found | {name: tensor.unflatten(0, next_BS.shape) for name, tensor in made.items()}


def train(trainer: DraftTrainer, recipe: Any, batches: StepBatches, steps: int) -> float:
    """Some steps, each of one micro batch, by the recipe's optimizer and schedule; the seconds they took."""
    adam = recipe.optimizer
    optimizer: torch.optim.Optimizer
    if adam.name == MUON:
        optimizer = MuonForMatrices(trainer, recipe)
    else:
        optimizer = torch.optim.AdamW(
            trainer.parameters(), lr=adam.lr, betas=tuple(adam.betas), eps=adam.eps, weight_decay=adam.weight_decay
        )
    warmup, began = round(adam.warmup_ratio * steps), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = adam.lr * learning_rate_factor(step, steps, warmup, adam.schedule)
        batch = batches.load(step, batches.row_numbers(step))
        optimizer.zero_grad()
        trainer(**batch, num_labels=batches.num_labels(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), adam.clip)
        optimizer.step()
    return time.perf_counter() - began


@torch.no_grad()
def measure(trainer: DraftTrainer, rows: list[Any], each_step: dict[str, Any]) -> dict[str, Any]:
    """As train/held_out_estimate.py, of a trainer beside the whole target; the loss is the mean over the steps of drafting."""
    sums: Any = 0
    for row in rows:
        ids_1S = torch.from_numpy(row.input_ids_S)[None].long()
        is_label_1S = torch.from_numpy(row.loss_mask_S > 0)[None]
        output = trainer(input_ids=ids_1S, labels=ids_1S.masked_fill(~is_label_1S, NO_LABEL), **each_step)
        sums = sums + torch.stack([output.agreement, output.loss, torch.ones_like(output.loss)]).double() * is_label_1S.sum()
    acceptance, losses = (sums[:2] / sums[2]).tolist()
    tokens = 1 + float(torch.tensor(acceptance).cumprod(0).sum())
    return {"tokens_a_round": tokens, "acceptance": acceptance, "loss": sum(losses) / len(losses)}


def compare(stage: Path, steps: int) -> dict[str, Any]:
    """One method's drafts, by the labels that they were trained on."""
    recipe: Any = load(stage / "recipe.yaml", Recipe)
    size = vocabulary_size(recipe)
    vocabulary = None if size is None else read_draft_vocabulary(stage.parent / f"draft_vocabulary_{size}.json")
    data = recipe.data
    folder = f"{data.name}-{data.collation}-{data.sequence_length}-{data.overlong}"
    rows = PackedRows(Path("data/packed/demo") / folder / "manifest.json")
    held_out = held_out_rows(rows, HELD_OUT)
    config = read_target_config(str(TARGET))
    states = TargetStates(load_target(str(TARGET), config, torch.float32, STATES_ATTENTION), attention="sdpa")
    method, settings = method_of(recipe, vocabulary)
    batches = StepBatches(TrainedRows(rows), recipe, recipe.global_batch, Ranks(0, 0, 1), position_limit(config))
    found: dict[str, Any] = {}
    for k in (None, *COUNTS):
        given = states if k is None else TopStates(states, k, method.learnt(settings))
        torch.manual_seed(recipe.seed)
        trainer = method.trainer(given, settings, None)
        seconds = train(trainer, recipe, batches, steps)
        whole = method.trainer(states, settings, None)
        whole.load_state_dict(trainer.state_dict())
        numbers = measure(whole, held_out, method.each_step(settings))
        mass = {"mass": sum(given.mass) / len(given.mass)} if isinstance(given, TopStates) else {}
        found["all" if k is None else str(k)] = numbers | mass | {"seconds": seconds}
        print(stage.parts[1], k, numbers | mass, f"{seconds:.0f} s", flush=True)
    return {"steps": steps, "tokens": vocabulary_size(recipe) or config.vocab_size, "by_k": found}


def main() -> None:
    """Both methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args()
    found = {name: compare(stage, chosen.steps) for name, stage in STAGES.items()}
    machine.write("top_k_training", {"machine": machine.describe(("torch",)), "held_out_rows": HELD_OUT, "methods": found})


if __name__ == "__main__":
    main()
