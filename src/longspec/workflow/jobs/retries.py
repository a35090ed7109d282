"""Which jobs have ended by Slurm's states, and how often a failed one is tried again.

A stage is tried again while it gets on, and not for a reason that cannot go away. What happened before `began`, the start of
this Snakemake in seconds since 1970, does not count: it may have been mended.
"""

from collections.abc import Mapping
from pathlib import Path

from longspec.cluster.attempt_logs import attempts, begun, time_of
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, SLOTS
from longspec.train.stage_folder import non_retryable_reason

OTHER_ENDS = {"PREEMPTED", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
TRIES = 2  # after the first, of a job that begins anew
# Jobs that go on where they were.
RESUMED = {"answer", "ask", "build_states", "evaluate"}
TRIES_OF_RESUMED = 10
FRUITLESS = 10  # tries in a row without a new checkpoint; nodes that fail and jobs that are preempted count too
FORGOTTEN = 3  # answers of Slurm in a row without a job after which it has forgotten it
PAUSE = 30  # seconds after a stage's job that has not begun, or any other that failed: Slurm may be away


def known_states(states: Mapping[str, str], seen: dict[str, int]) -> dict[str, str]:
    """Translate Slurm's states of jobs into words the executor knows. seen: the jobs that Slurm has told of before, with the
    answers since that have left them out; updated. A busy squeue may leave out all of them and end well.

    The executor waits for ever for a job that is preempted (unless Slurm runs it again, which it must not: slurm-no-requeue),
    that ends in a way it has no word for, or that Slurm has forgotten between two questions; and for the rest of its life it
    keeps jobs from all nodes of one that lost one (NODE_FAIL).
    """
    words = {job: state.split(" ")[0] for job, state in states.items()}
    known = {job: "FAILED" if word in OTHER_ENDS else word for job, word in words.items()}
    seen.update({job: missed + 1 for job, missed in seen.items()} | dict.fromkeys(known, 0))
    # Taken for a success whose files are then looked for.
    return {job: "UNKNOWN" for job, missed in seen.items() if missed >= FORGOTTEN} | known


def reason_to_give_up(stage: Path, log: Path, began: float) -> str:
    """Say why the stage of a folder is not to be tried again; empty when it is."""
    if hopeless := non_retryable_reason(stage, began):
        return f"it would fail in the same way again: {hopeless}"
    saved = max(time_of(stage / "checkpoints" / slot / MANIFEST) for slot in SLOTS)
    # The attempt that has saved last ended after it.
    fruitless = sum(time_of(path) > max(saved, began) for path in attempts(log)) - (saved > began)
    if fruitless >= FRUITLESS:
        return f"{fruitless} tries in a row without a new checkpoint; their logs: {log.with_suffix('')}"
    return ""


def retries(rule: str, allowed: int, attempt: int, output: Path, log: Path, began: float) -> tuple[int, int, str]:
    """Return the tries of a failed job after the first, seconds to wait before the next, and why a stage has none.

    A stage has as many as the profile allows of jobs that never begin, and any number of those that do while it gets on.
    """
    if rule == "train":
        reason, tried = reason_to_give_up(output.parent, log, began), begun(log, began)
        # Snakemake sends a job again while it has fewer attempts than one more than these.
        return (0, 0, reason) if reason else (allowed + tried, PAUSE if tried < attempt else 0, "")
    return min(allowed, TRIES_OF_RESUMED if rule in RESUMED else TRIES), PAUSE, ""
