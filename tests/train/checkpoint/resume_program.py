"""A program of several ranks that trains, saves and goes on: python -m tests.train.checkpoint.resume_program PLAN.

PLAN is a JSON file: target, data, folder and cases. Each case builds a new engine:
    name, overrides     of the configuration
    go_on               a case whose checkpoint it begins from; else from step 0
    steps, save_at      the last step, and the one after which it saves
    poison              the step in which the last rank's first gradient is not a number
    trouble             a save after this step must fail, on the last rank
It leaves {folder}/{name}.json (losses by step, what each rank was told) and {name}.safetensors and {name}-saved.safetensors
(float32 weights at the end and when it saved, put together in process).

Under ZeRO-3 only norms stay whole on every rank: DeepSpeed's own bound would leave all parameters of a tiny draft whole.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks, end_at_once, find_ranks, share_global_batch
from longspec.models.target import resolve_dtype
from longspec.train import engine as engines
from longspec.train.checkpoint import save_load, zero_state
from longspec.train.engine import boot, build_engine
from longspec.train.held_out_estimate import HeldOut
from longspec.train.micro_batches import StepBatches
from longspec.train.setup import build_trainer
from longspec.train.stage_folder import find_resumable
from tests.jobs import RECIPE

TOTAL = 12  # steps the learning rate is laid out for
IDENTITY = {"recipe": 1}
FILE_LIMIT = 10_000  # bytes
PERSISTENT = 100  # elements of a parameter that ZeRO-3 leaves whole on every rank
UNWATCHED = (lambda: None, lambda: None)  # of a save: no owner is checked, nothing is recorded


def partition_all(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """DeepSpeed's configuration as the trainer makes it, with our bound."""

    def deepspeed_config(*arguments: Any) -> dict[str, Any]:
        config = own(*arguments)
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT
        return config

    return deepspeed_config


def kept_whole(engine: Any) -> dict[str, bool]:
    """Of each trained parameter, whether ZeRO-3 leaves it whole between two uses."""
    return {name: parameter.numel() > 0 for name, parameter in zero_state.trained(engine).items()}


def build(case: dict[str, Any], plan: dict[str, Any], ranks: Ranks) -> tuple[Any, StepBatches, HeldOut]:
    config = compose("train", [*RECIPE, *case["overrides"]])
    recipe, runtime = config.recipe, config.runtime
    dtype = resolve_dtype(recipe.precision)
    trainer = build_trainer(recipe, runtime, plan["target"], None, torch.device("cpu"), dtype)
    share = share_global_batch(recipe.global_batch, runtime.micro_batch, ranks.world_size)
    engine = build_engine(trainer, recipe, runtime, share, TOTAL, dtype, Path(plan["data"]).parent)
    rows = PackedRows(Path(plan["data"]))
    held_out = HeldOut([rows], recipe, runtime, ranks, case["steps"])
    return engine, StepBatches(TrainedRows(rows), recipe, share[0], ranks, 400), held_out


def train_step(engine: Any, batches: StepBatches, step: int, ranks: Ranks, *, poison: bool) -> float:
    losses = []
    parts = batches.micro_batches(step)
    for row_numbers in parts:
        batch = batches.load(step, row_numbers)
        loss = engine(**batch, num_labels=batches.num_labels(step)).loss
        factor = float("nan") if poison and not losses and ranks.rank == ranks.world_size - 1 else 1.0
        engine.backward(loss * (factor * len(parts) * ranks.world_size))
        engine.step()
        losses.append(loss.detach().float())
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return float(total)


@contextmanager
def limited_files(ranks: Ranks) -> Iterator[None]:
    """A limit on the size of files that the last rank alone runs into while it writes."""
    if ranks.rank == ranks.world_size - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))
    dist.barrier()
    yield
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def keep_weights(engine: Any, path: Path) -> None:
    """Put the float32 weights of all ranks together; rank 0 writes them."""
    mine = [(part.name, part.start, part.kinds["fp32"].clone()) for part in zero_state.owned(engine)]
    weights: dict[str, torch.Tensor] = {}
    for name, shape in zero_state.shapes(engine).items():
        whole = torch.zeros(shape, device=engine.device).flatten()
        for _, start, part in (each for each in mine if each[0] == name):
            whole[start : start + part.numel()] = part.to(whole.device)
        # Added as whole numbers: every element is zero but on one rank, and so keeps all its bits, -0.0 among them.
        dist.reduce(bits := whole.view(torch.int32), dst=0)
        weights[name] = bits.view(torch.float32).view(shape).cpu()
    if dist.get_rank() == 0:
        save_file(weights, path)


def run(case: dict[str, Any], plan: dict[str, Any], ranks: Ranks) -> None:
    engine, batches, held_out = build(case, plan, ranks)
    folder = Path(plan["folder"])
    own = folder / case["name"] / "checkpoints"
    result: dict[str, Any] = {"losses": {}, "told": None, "left": None, "whole": []}
    step = 0

    if "go_on" not in case:
        torch.manual_seed(ranks.rank)  # not as a new engine begins: no draw of the training hangs on it
    else:
        before = folder / case["go_on"] / "checkpoints"
        slot, found = find_resumable(before, IDENTITY)
        save_load.load(engine, before / slot, found, ranks)
        step, result["found"] = found["step"], {key: found[key] for key in ("step", "trackers", "world_size", "zero_stage")}
    while step < case["steps"]:
        result["losses"][step] = train_step(engine, batches, step, ranks, poison=step == case.get("poison"))
        step += 1
        if step - 1 != case.get("poison"):  # after a step that is left out, nothing is whole before the next forward
            result["whole"].append(kept_whole(engine))
        estimated = held_out.estimate(engine, step)
        if estimated is not None:
            result.setdefault("held_out", {})[step] = estimated
        state = {"step": step, "steps": TOTAL, "identity": IDENTITY, "trackers": {"wandb": "abc"}}
        if step == case.get("save_at"):
            result["bytes"] = save_load.save(engine, own, state, ranks, *UNWATCHED)
            keep_weights(engine, folder / f"{case['name']}-saved.safetensors")
        if step == case.get("trouble"):
            told = ""
            with limited_files(ranks):
                try:
                    save_load.save(engine, own, state, ranks, *UNWATCHED)
                except save_load.SaveError as error:
                    told = str(error)
            everyone: list[Any] = [None] * ranks.world_size
            dist.all_gather_object(everyone, told)
            result["told"], result["left"] = everyone, sorted(path.name for path in own.iterdir())
    keep_weights(engine, folder / f"{case['name']}.safetensors")
    if ranks.is_main:
        (folder / f"{case['name']}.json").write_text(
            json.dumps(result | {"lr": engine.get_lr(), "skipped": engine.skipped_steps})
        )
    engine.destroy()


def main() -> None:
    ranks = find_ranks()
    boot(ranks, 5)
    engines.deepspeed_config = partition_all(engines.deepspeed_config)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for case in plan["cases"]:
        run(case, plan, ranks)
    end_at_once(0)


if __name__ == "__main__":
    main()
