"""Train one stage of a draft: `python -m longspec.train --help`. One flat loop, read from top to bottom.

A killed job is started again by the same command and goes on from its last checkpoint, bit by bit.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from longspec.distributed import Ranks, die_with_parent, end_at_once, find_ranks, is_launched, log, share_global_batch

if __name__ == "__main__" and is_launched():  # before the imports below, which take seconds
    die_with_parent()  # a rank ends with its launcher, so that none trains on alone

import torch
import torch.distributed as dist
from tqdm import tqdm

from longspec import jsonl
from longspec.atomic_files import checked_folder, named_folder
from longspec.config import Runtime
from longspec.distributed import of_first_rank
from longspec.families import position_limit
from longspec.lease import Lease, acquire
from longspec.methods import measures_target
from longspec.methods.draft_files import draft_weights_file
from longspec.models.losses import NO_LABEL
from longspec.models.target import resolve_dtype
from longspec.models.weight_files import read_tensors
from longspec.shown import of_disk, one_line
from longspec.train import stage_folder
from longspec.train.arguments import Job, freeze, read_job
from longspec.train.checkpoint import save_load
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS, SLOTS
from longspec.train.dry_batch import check_memory
from longspec.train.engine import FLOAT32_SUMS, boot, build_engine, sums_in_float32
from longspec.train.estimate import plan
from longspec.train.held_out_estimate import HeldOut
from longspec.train.metrics import Metrics, costs_of
from longspec.train.micro_batches import ReadAhead, StepBatches
from longspec.train.preemption import SkippedSteps, Stop
from longspec.train.setup import build_trainer, declared_states, identity_of, open_rows, read_vocabulary, total_steps
from longspec.train.stage_folder import Status, find_resumable, non_retryable
from longspec.train.trackers import Trackers, chosen

SLOW_DISK = 50e6  # bytes a second: assumed for a stage's first save

# Progress of a stage that has no checkpoint yet.
FRESH: dict[str, Any] = {"step": 0, "tokens_seen": 0, "seconds": 0.0, "saving": 0.0}


def train_step(
    engine: Any, reader: ReadAhead, step: int, accumulation: int, stop: Stop, runtime: Runtime, skips: SkippedSteps
) -> dict[str, Any] | None:
    """Make one optimizer step over this rank's share of the global batch; losses are means over the global batch's labels.

    A loss that was not asked for (runtime.log_target_loss) is None. Returns None if the job is to stop: the partial
    accumulation is dropped, and nothing has changed since the step before.
    """
    batches, waited = reader.batches, 0.0
    num_labels = max(1, batches.num_labels(step))  # a global batch may have no labels
    sums = [torch.zeros((), device=engine.device) for _ in range(3)]
    counts: dict[str, torch.Tensor] = {}
    losses, skipped = [], engine.skipped_steps
    measured = measures_target(batches.recipe, runtime)
    for _ in range(accumulation):
        if stop.before_micro_batch():
            return None
        began = time.perf_counter()
        with non_retryable(unless=step > 0):
            batch = reader.take()
        waited += time.perf_counter() - began
        labels = (batch["labels"][:, 1:] != NO_LABEL).sum()
        output = engine(**batch, num_labels=num_labels, with_llm_loss=measured)
        # DeepSpeed divides by the accumulation steps and the ranks; the loss is already a share of the global mean.
        engine.backward(output.loss * (accumulation * batches.ranks.world_size))
        engine.step()
        losses.append((batch["row_numbers"], output.loss.detach()))
        sums[0] += output.loss.detach()
        for total, mean in zip(sums[1:], (output.llm_loss, output.agreement), strict=True):
            if mean is not None:
                total += mean * labels
        counts = {name: counts.get(name, 0) + count for name, count in output.counts.items()}
    all_sums = torch.stack([value.detach().float() for value in (*sums, *counts.values())]).to(engine.device)
    dist.all_reduce(all_sums)
    loss, target_sum, agreement_sum, *counted = all_sums.tolist()
    skips.check_step(step + 1, losses, skipped=engine.skipped_steps > skipped)
    return {
        "loss": loss,
        "llm_loss": None if output.llm_loss is None else target_sum / num_labels,
        "agreement": None if output.agreement is None else agreement_sum / num_labels,
        "labels": num_labels,
        "tokens": batches.recipe.global_batch * batches.rows.sequence_length,
        "data_seconds": waited,
        **{name: int(count) for name, count in zip(counts, counted, strict=True)},
        **batches.rows.labels_by_source(batches.row_numbers(step)),
    }


def shown(value: float | None) -> str:
    """Return a number for the log; a dash if it was not measured."""
    return "-" if value is None else f"{value:.4f}"


def train(job: Job, ranks: Ranks, device: torch.device, status: Status, stop: Stop) -> None:
    """Train the stage, from its start or its last checkpoint to its last step or a request to stop."""
    folder = job.out / CHECKPOINTS
    begun = any((folder / slot).exists() for slot in SLOTS)
    with non_retryable():
        micro_batch, accumulation = share_global_batch(job.recipe.global_batch, job.runtime.micro_batch, ranks.world_size)
        chosen(job.runtime)
    with non_retryable(unless=begun):
        named_folder(job.target)
        rows = open_rows(job)
        vocabulary = read_vocabulary(job, rows)
        steps, dtype = total_steps(job, rows), resolve_dtype(job.recipe.precision)
        held_out = HeldOut(rows.own, job.recipe, job.runtime, ranks, steps)
        declared = declared_states(job, rows, held_out.of_each, dtype, vocabulary)
        identity = identity_of(job, rows, dtype, vocabulary, declared)
    # Before the target is loaded. It hashes every rank's file of the newest checkpoint; a slot that is damaged for one node may
    # be whole for the next.
    found = of_first_rank(lambda: find_resumable(folder, identity), ranks)
    status.step, status.steps = FRESH["step"] if found is None else found[1]["step"], steps
    if found is not None and status.step == steps:  # started only for newer inputs: neither target nor states are needed
        log(f"stage {job.recipe.stage}: is trained already, {steps} steps from the same", ranks)
        publish(job, folder, ranks, found[1], status)
        return
    with non_retryable(unless=found is not None):
        stored = None if declared is None else declared.find(job.states)
        target_path = of_first_rank(lambda: checked_folder(job.target), ranks)  # it may read all weights once more
        trainer = build_trainer(job.recipe, job.runtime, target_path, job.init_weights, device, dtype, vocabulary, stored)
    with non_retryable(unless=found is not None):
        check_memory(trainer, job.recipe, job.runtime, micro_batch, ranks, device, dtype)
    if accumulation > 1 and dtype == torch.bfloat16 and not sums_in_float32(job.runtime):
        ways = FLOAT32_SUMS[job.recipe.optimizer.name]
        log(f"each step's gradients of {accumulation} micro batches are added up in bfloat16; {ways}", ranks)
    engine = build_engine(trainer, job.recipe, job.runtime, (micro_batch, accumulation), steps, dtype, folder)
    resumed = FRESH
    if found is not None:
        slot, resumed = found
        save_load.load(engine, folder / slot, resumed, ranks)
    elif job.init_weights is not None and dtype != torch.float32:
        save_load.begin(engine, read_tensors(draft_weights_file(job.init_weights)))
    code = stage_folder.trained_by() if ranks.is_main else {}
    step, tokens_seen, seconds, saving = (resumed[name] for name in ("step", "tokens_seen", "seconds", "saving"))
    with non_retryable(unless=found is not None):
        size = save_load.check_room(engine, folder, steps - step, ranks)
    stop.expect_save(resumed.get("longest_save", 0.0), size / SLOW_DISK)
    log(
        f"stage {job.recipe.stage}: {steps} steps of {job.recipe.global_batch} rows of {rows.sequence_length} tokens; "
        f"{ranks.world_size} processes x {accumulation} micro batches of {micro_batch} rows; "
        f"ZeRO-{job.runtime.deepspeed.zero_stage}, {dtype}, attention {trainer.states.attention}, {device}; "
        f"starting at step {step}",
        ranks,
    )
    batches = StepBatches(rows, job.recipe, micro_batch, ranks, position_limit(trainer.states.config))
    with non_retryable():
        metrics = Metrics(folder / "metrics.jsonl", step, status.check_owner) if ranks.is_main else None
    record = [] if metrics is None else jsonl.whole_lines(metrics.path)
    trackers = Trackers(job.runtime, job.out, ranks, identity, resumed.get("trackers"), record)
    bar = tqdm(total=steps, initial=step, disable=not (ranks.is_main and sys.stderr.isatty()))
    skips = SkippedSteps(folder / "skipped.jsonl", ranks, job.runtime.max_skipped_in_a_row)
    saved = step
    with trackers, ReadAhead(batches, trainer.states, range(step, steps), device) as reader:
        while step < steps:
            began = time.perf_counter()
            lr = engine.get_lr()[0]
            numbers = train_step(engine, reader, step, accumulation, stop, job.runtime, skips)
            if numbers is not None:
                step += 1
                tokens_seen += int(numbers["tokens"])
                elapsed = time.perf_counter() - began
                seconds += elapsed
                status.step = step
                estimated = held_out.estimate(engine, step, stop.begin_part)
                norm = engine.get_global_grad_norm()  # before clipping; None where DeepSpeed measures none (ZeRO-0 in float32)
                row = {"step": step, **numbers, "lr": lr, "grad_norm": None if norm is None else float(norm)}
                row |= {"tokens_seen": tokens_seen, "seconds": elapsed, "skipped": engine.skipped_steps}
                row |= {} if estimated is None else {"held_out": estimated}
                if metrics is not None:
                    row |= costs_of(row, batches, trainer.states.config, job.runtime, device, dtype)
                    metrics.append(row)
                    trackers.log(row)
                    bar.update()
                    if step % job.runtime.log_every == 0 or step == steps:
                        log(
                            f"step {step}/{steps} loss {row['loss']:.4f} target {shown(row['llm_loss'])} "
                            f"agreement {shown(row['agreement'])} lr {lr:.2e} grad {shown(row['grad_norm'])} "
                            f"{row['tokens'] / elapsed:.0f} tokens/s"
                        )
            due = step % job.runtime.save_every == 0 or step == steps or numbers is None or stop.save_due
            if due and step > saved:
                began = time.perf_counter()
                stop.begin_part()
                state = {"step": step, "steps": steps, "tokens_seen": tokens_seen, "seconds": seconds, "saving": saving}
                state |= {**code, "trackers": trackers.ids, "identity": identity, "longest_save": stop.longest_save}
                sync = metrics.sync if metrics else lambda: None
                size = save_load.save(engine, folder, state, ranks, status.check_owner, sync)
                if ranks.is_main:
                    status.write("running")
                saved, took = step, time.perf_counter() - began
                saving += took
                stop.saved(took)
                log(
                    f"saved step {step}, {size / 2**20:.1f} MiB, in {took:.2f} s; "
                    f"saving took {saving / (saving + seconds):.1%} of the time so far",
                    ranks,
                )
            if numbers is None:
                return
    faulthandler.cancel_dump_traceback_later()
    bar.close()
    publish(job, folder, ranks, {"seconds": seconds, "saving": saving}, status, metrics)


def publish(
    job: Job, folder: Path, ranks: Ranks, progress: dict[str, Any], status: Status, metrics: Metrics | None = None
) -> None:
    """Publish metrics.jsonl and checkpoint.json under their final names, on rank 0. progress: as stored in a checkpoint."""
    if not ranks.is_main:
        return
    metrics = metrics or Metrics(folder / "metrics.jsonl", status.steps, status.check_owner)
    metrics.publish(job.out / "metrics.jsonl")
    times = {"training_seconds": progress["seconds"], "saving_seconds": progress["saving"]}
    stage_folder.publish(job, folder, ranks, times, status.steps, status.check_owner)


def run(job: Job, ranks: Ranks, lease: Lease | None) -> int:
    """Train, write to status.json how it ended, and return the exit code. Rank 0 holds the lease."""
    status = Status(job.out, lease.check if lease else lambda: None)
    if ranks.is_main:
        status.write("running")
    try:
        device = boot(ranks, job.runtime.timeout_minutes)
        # Not earlier: until here a signal ends at once a rank that still waits for the others.
        timeout = timedelta(minutes=job.runtime.timeout_minutes)
        control = dist.new_group(backend="gloo", timeout=timeout) if ranks.world_size > 1 else None
        longest_part = min(job.runtime.watchdog_seconds, 60 * job.runtime.timeout_minutes)
        stop = Stop(longest_part, job.deadline, job.runtime.stop_margin_seconds, control, ranks.local_rank)
        stop.save_seconds = 60.0 * job.runtime.save_minutes
        train(job, ranks, device, status, stop)
        if status.step == status.steps and ranks.is_main and job.runtime.extract_at_end:
            stage_folder.extract_draft(job)
    except BaseException as error:
        if ranks.is_main:
            with suppress(OSError):  # a full disk: the error itself says so
                status.fail(error)
        raise
    done = status.step == status.steps
    if ranks.is_main:
        status.write("done" if done else "stopped", "" if done else stop.reason)
    if not done:
        log(f"stopped at step {status.step} of {status.steps}: {stop.reason}", ranks)
    # After a stop only rank 0 returns an error code: a launcher that sees one ends the other ranks, while rank 0 still has to
    # close its trackers and release its folder.
    return 0 if done or not ranks.is_main else os.EX_TEMPFAIL


def main() -> None:
    """Run one rank; the reason for a failure is the last line of the log and is in status.json."""
    if sys.argv[1:2] == ["plan"]:
        sys.exit(plan.main(sys.argv[2:]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until Stop handles it: nothing needs a clean end yet
    ranks, lease = find_ranks(), None
    if ranks.is_main:  # logs the choice of an attention backend with its reason
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
        logging.getLogger("longspec").setLevel(logging.INFO)
    try:
        job = read_job(None, ranks)
        # Taken before status.json, which may be another running job's, is written, and kept until nothing more is written.
        if ranks.is_main:
            lease = acquire(job.out)
            freeze(job)
        code = run(job, ranks, lease)
    except (ValueError, save_load.SaveError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        code = 1
    except Exception as error:
        print(of_disk(error) or traceback.format_exc().rstrip(), file=sys.stderr, flush=True)
        code = 1
    finally:
        if lease is not None:
            lease.release()
    end_at_once(code)


if __name__ == "__main__":
    main()
