"""Decide from Slurm's states which jobs have ended, and how often a failed job is retried.

A job that resumes where it was is retried while it makes progress. A stage is not retried if its failure would come again.
Failures before `began`, the start of this Snakemake in seconds since 1970, do not count: their causes may be fixed.
"""

from collections.abc import Mapping
from pathlib import Path

from longspec.answers.settings import JOURNAL
from longspec.cluster.attempt_logs import attempts, begun, time_of
from longspec.journal import unfinished
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, SLOTS
from longspec.train.stage_folder import non_retryable_reason

Seen = dict[Path, tuple[int, int]]  # a job's output -> bytes that it had saved, and its attempts until then
OTHER_ENDS = {"PREEMPTED", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
TRIES = 2  # after the first, for a job that starts from the beginning
# What a job that resumes has saved, beside its output.
SAVED = {"answer": JOURNAL, "ask": JOURNAL, "build_states": "*.safetensors", "evaluate": unfinished(Path("{0}")).name}
FRUITLESS = 10  # tries in a row of a job that resumes without saving more, node failures and preemptions included
FORGOTTEN = 3  # answers of Slurm in a row without a job until it counts as forgotten
PAUSE = 30  # seconds before a retry of a stage's job that has not begun, or of any other job: Slurm may be away


def known_states(states: Mapping[str, str], seen: dict[str, int]) -> dict[str, str]:
    """Translate Slurm's states of jobs into words the executor knows. seen: job -> answers in a row that have left it out, for
    all jobs that Slurm has reported; updated here. A busy squeue may leave out all jobs and still succeed.

    The executor waits forever for a preempted job (unless Slurm runs it again, which it must not: slurm-no-requeue), for a job
    that ends with a state it does not know, and for a job that Slurm has forgotten between two questions. And after one job's
    NODE_FAIL it keeps jobs away from all of its nodes for as long as it runs.
    """
    words = {job: state.split(" ")[0] for job, state in states.items()}
    known = {job: "FAILED" if word in OTHER_ENDS else word for job, word in words.items()}
    seen.update({job: missed + 1 for job, missed in seen.items()} | dict.fromkeys(known, 0))
    # Counted as a success, after which the job's files are looked for.
    return {job: "UNKNOWN" for job, missed in seen.items() if missed >= FORGOTTEN} | known


def reason_to_give_up(stage: Path, log: Path, began: float) -> str:
    """Return why a stage is not to be retried; "" if it is. stage: its folder."""
    if hopeless := non_retryable_reason(stage, began):
        return f"it would fail in the same way again: {hopeless}"
    saved = max(time_of(stage / "checkpoints" / slot / MANIFEST) for slot in SLOTS)
    # The attempt that saved last ended after that save.
    fruitless = sum(time_of(path) > max(saved, began) for path in attempts(log)) - (saved > began)
    if fruitless >= FRUITLESS:
        return f"{fruitless} tries in a row without a new checkpoint; their logs: {log.with_suffix('')}"
    return ""


def last_fruitful(rule: str, attempt: int, output: Path, seen: Seen) -> int:
    """Return the last attempt of a job that resumes after which more was saved than ever in this call, 0 for none.

    seen: of all such jobs; updated.
    """
    saved = sum(path.stat().st_size for path in output.parent.glob(SAVED[rule].format(output.stem)))
    if saved > seen.get(output, (0, 0))[0]:
        seen[output] = saved, attempt
    return seen.get(output, (0, 0))[1]


def retries(rule: str, allowed: int, attempt: int, output: Path, log: Path, began: float, seen: Seen) -> tuple[int, int, str]:
    """Return the tries of a failed job after the first, seconds to wait before the next, and why a stage gets none.

    A stage gets the profile's number of tries for jobs that never begin, and any number for others, while it makes progress.
    Answers, stored states and evaluations are given up after FRUITLESS tries in a row that saved nothing, or fewer if `allowed`
    says so.
    """
    if rule == "train":
        reason, tried = reason_to_give_up(output.parent, log, began), begun(log, began)
        # Snakemake resubmits a job while its attempts are at most this number.
        return (0, 0, reason) if reason else (allowed + tried, PAUSE if tried < attempt else 0, "")
    if rule in SAVED:
        return last_fruitful(rule, attempt, output, seen) + min(allowed, FRUITLESS - 1), PAUSE, ""
    return min(allowed, TRIES), PAUSE, ""
