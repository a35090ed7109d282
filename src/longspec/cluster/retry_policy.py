"""Whether a failed job is sent again: progress earns another try, a reason that cannot go away none."""

from itertools import accumulate, pairwise
from pathlib import Path

from longspec.cluster.attempt_logs import folder_of
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, SLOTS
from longspec.train.stage_folder import non_retryable_reason

FRUITLESS = 10  # tries in a row without a new checkpoint; nodes that fail and jobs that are preempted count too
NEVER_BEGUN = 10  # tries that were refused or ended before they had a log


def begun(log: Path, since: float) -> int:
    """The number of attempts whose log was written to after `since`, in seconds since 1970."""
    return sum(_time(path) >= since for path in folder_of(log).glob("attempt-*.log"))


def reason_to_give_up(stage: Path, log: Path, since: float, tried: int) -> str:
    """Why the stage of a folder is not to be tried again; empty when it is.

    `log` is its job's log, beside which all attempts' lie; `tried` how often it was sent. What happened before `since`, in
    seconds since 1970, does not count: it may have been mended.
    """
    if hopeless := non_retryable_reason(stage, since):
        return f"it would fail in the same way again: {hopeless}"
    saved = max((_time(stage / "checkpoints" / slot / MANIFEST) for slot in SLOTS), default=0.0)
    ends = [_time(path) for path in folder_of(log).glob("attempt-*.log")]
    # The attempt that has saved last ended after it.
    fruitless = sum(end > max(saved, since) for end in ends) - (saved > since)
    if fruitless >= FRUITLESS:
        return f"{fruitless} tries in a row without a new checkpoint; their logs: {folder_of(log)}"
    never_begun = tried - begun(log, since)
    if never_begun >= NEVER_BEGUN:
        return f"{never_begun} tries ended before they began; see what Slurm says above, and its own logs below logs/slurm"
    return ""


def measured_lines(unfinished: Path) -> int:
    """The whole lines of an evaluation or of answers behind the first, which tells what they were made with."""
    return max(0, unfinished.read_bytes().count(b"\n") - 1) if unfinished.exists() else 0


def fruitful_tries(done: dict[int, int], attempt: int, so_far: int) -> int:
    """How many tries, up to this failed one, left more done than any before.

    `done`: by try, kept by the caller; `so_far`: how much is done now. A try may be asked for more than once. A first try is
    counted where it found work of an earlier one.
    """
    done.setdefault(attempt, so_far)
    most = [0, *accumulate((done[each] for each in sorted(done)), max)]
    return sum(after > before for before, after in pairwise(most))


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
