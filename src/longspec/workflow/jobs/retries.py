"""Which jobs have ended by Slurm's states, and how often a failed one is tried again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from longspec.answers.settings import JOURNAL
from longspec.cluster.retry_policy import begun, fruitful_tries, measured_lines, reason_to_give_up
from longspec.journal import unfinished
from longspec.workflow.states import stored_rows

OTHER_ENDS = {"PREEMPTED", "NODE_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
TRIES_OF_OTHERS = 2  # after the first, of jobs that do not go on where they were
PAUSE = 30  # seconds after a stage's job that has not begun, or any other that failed: Slurm may be away


@dataclass
class KnownStates:
    """Slurm's states of jobs in words the executor knows; `seen` are the jobs that Slurm has told of before."""

    seen: set[str] = field(default_factory=set)

    def translate(self, states: Mapping[str, str]) -> dict[str, str]:
        """The executor waits for ever for a job that is preempted (unless Slurm runs it again, which it must not:
        slurm-no-requeue), that ends in a way it has no word for, or that Slurm has forgotten between two questions; and for
        the rest of its life it keeps jobs from all nodes of one that lost one (NODE_FAIL).
        """
        words = {job: state.split(" ")[0] for job, state in states.items()}
        known = {job: "FAILED" if word in OTHER_ENDS else word for job, word in words.items()}
        self.seen.update(known)
        # Taken for a success whose files are then looked for.
        return dict.fromkeys(self.seen - known.keys(), "UNKNOWN") | known


@dataclass(frozen=True)
class Retries:
    """The tries of a failed job after the first; seconds to wait before the next; why there is none, empty when not told."""

    allowed: int
    pause: int = 0
    reason: str = ""


@dataclass
class RetryPolicy:
    """began: since when what happened counts, in seconds since 1970; done: by a job's output, what its tries left."""

    began: float
    done: dict[Path, dict[int, int]] = field(default_factory=dict)

    def stage(self, allowed: int, attempt: int, folder: Path, log: Path) -> Retries:
        """A stage is tried again as often as the profile allows, unless it is without hope: that is told now, and not after
        fifty more jobs.
        """
        if reason := reason_to_give_up(folder, log, self.began, attempt):
            return Retries(0, reason=reason)
        return Retries(allowed, PAUSE if begun(log, self.began) < attempt else 0)

    def other(self, rule: str, allowed: int, attempt: int, output: Path) -> Retries:
        """Any other job has few tries, whatever the profile allows; those that measured, stored or answered are not counted."""
        if rule in ("evaluate", "evaluate_bench"):
            done = measured_lines(unfinished(output))
        elif rule in ("build_states", "held_out_states"):
            done = stored_rows(output.parent)
        else:  # of a rule that answers nothing there is no journal
            done = measured_lines(output.with_name(JOURNAL)) if rule in ("answer", "ask") else 0
        uncounted = fruitful_tries(self.done.setdefault(output, {}), attempt, done)
        return Retries(min(allowed, TRIES_OF_OTHERS + uncounted), PAUSE if attempt <= TRIES_OF_OTHERS else 0)
