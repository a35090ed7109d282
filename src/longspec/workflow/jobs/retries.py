"""Which jobs have ended by Slurm's states, and how often a failed one is tried again.

Progress earns another try, a reason that cannot go away none. What happened before `began`, the start of this Snakemake in
seconds since 1970, does not count: it may have been mended.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from longspec.answers.settings import JOURNAL
from longspec.cluster.attempt_logs import attempts, begun, time_of
from longspec.journal import unfinished
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, SLOTS
from longspec.train.stage_folder import non_retryable_reason
from longspec.workflow.states import stored_rows

OTHER_ENDS = {"PREEMPTED", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
TRIES_OF_OTHERS = 2  # after the first, of jobs that do not go on where they were
FRUITLESS = 10  # tries in a row without a new checkpoint; nodes that fail and jobs that are preempted count too
NEVER_BEGUN = 10  # tries that were refused or ended before they had a log
PAUSE = 30  # seconds after a stage's job that has not begun, or any other that failed: Slurm may be away


def known_states(states: Mapping[str, str], seen: set[str]) -> dict[str, str]:
    """Translate Slurm's states of jobs into words the executor knows. seen: the jobs that Slurm has told of before; updated.

    The executor waits for ever for a job that is preempted (unless Slurm runs it again, which it must not: slurm-no-requeue),
    that ends in a way it has no word for, or that Slurm has forgotten between two questions; and for the rest of its life it
    keeps jobs from all nodes of one that lost one (NODE_FAIL).
    """
    words = {job: state.split(" ")[0] for job, state in states.items()}
    known = {job: "FAILED" if word in OTHER_ENDS else word for job, word in words.items()}
    seen.update(known)
    # Taken for a success whose files are then looked for.
    return dict.fromkeys(seen - known.keys(), "UNKNOWN") | known


def reason_to_give_up(stage: Path, log: Path, began: float, tried: int) -> str:
    """Say why the stage of a folder is not to be tried again; empty when it is. tried: how often its job was sent."""
    if hopeless := non_retryable_reason(stage, began):
        return f"it would fail in the same way again: {hopeless}"
    saved = max(time_of(stage / "checkpoints" / slot / MANIFEST) for slot in SLOTS)
    # The attempt that has saved last ended after it.
    fruitless = sum(time_of(path) > max(saved, began) for path in attempts(log)) - (saved > began)
    if fruitless >= FRUITLESS:
        return f"{fruitless} tries in a row without a new checkpoint; their logs: {log.with_suffix('')}"
    never_begun = tried - begun(log, began)
    if never_begun >= NEVER_BEGUN:
        return f"{never_begun} tries ended before they began; see what Slurm says above, and its own logs below logs/slurm"
    return ""


def fruitful_tries(done: dict[int, int], attempt: int, so_far: int) -> int:
    """Count the tries, up to this failed one, that left more done than any before.

    done: by try, kept by the caller; so_far: how much is done now. A try may be asked for more than once. A first try is
    counted where it found work of an earlier one.
    """
    done.setdefault(attempt, so_far)
    most = [0, *accumulate((done[each] for each in sorted(done)), max)]
    return sum(after > before for before, after in pairwise(most))


def work_done(rule: str, output: Path) -> int:
    """Count the whole lines that a job has measured or answered, or the rows that it has stored; 0 of one that begins anew."""
    if rule in ("build_states", "held_out_states"):
        return stored_rows(output.parent)
    if rule in ("evaluate", "evaluate_bench"):
        journal = unfinished(output)
    elif rule in ("answer", "ask"):
        journal = output.with_name(JOURNAL)
    else:
        return 0
    # The first line says what the others were made with.
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def retries(
    rule: str, allowed: int, attempt: int, output: Path, log: Path, began: float, done: dict[Path, dict[int, int]]
) -> tuple[int, int, str]:
    """Return the tries of a failed job after the first, seconds to wait before the next, and why a stage has none.

    A stage has as many as the profile allows, unless it is without hope. Any other job has few, of which those that left more
    done are not counted. done: by a job's output, what its tries left; updated.
    """
    if rule == "train":
        reason = reason_to_give_up(output.parent, log, began, attempt)
        return (0, 0, reason) if reason else (allowed, PAUSE if begun(log, began) < attempt else 0, "")
    tries = TRIES_OF_OTHERS + fruitful_tries(done.setdefault(output, {}), attempt, work_done(rule, output))
    return min(allowed, tries), PAUSE if attempt <= TRIES_OF_OTHERS else 0, ""
