"""A job that only tracks: `python -m tests.train.tracked OUT RESUMED LAST SAVED NUMBER [kill]`, one attempt of several.

It goes on from step RESUMED to LAST, keeps the checkpoint's state as of SAVED, and logs step + NUMBER / 10 as its loss. In
the end it kills itself or closes its trackers.
"""

import json
import os
import signal
import sys
from pathlib import Path

from omegaconf import OmegaConf

from longspec.config import Runtime
from longspec.distributed import Ranks
from longspec.train.metrics import Metrics, whole_lines
from longspec.train.trackers import Trackers


def main(out: Path, resumed: int, last: int, saved: int, number: int, kill: bool) -> None:
    runtime = OmegaConf.structured(Runtime(report_to=["tensorboard", "wandb", "swanlab"], tracker_mode="offline"))
    state = out / "state.json"
    ids = json.loads(state.read_text()) if resumed else None
    metrics = Metrics(out / "metrics.jsonl", resumed)
    with Trackers(runtime, out, Ranks(0, 0, 1), {"recipe": {"seed": 1}}, ids, whole_lines(metrics.path)) as trackers:
        for step in range(resumed + 1, last + 1):
            row = {"step": step, "loss": step + number / 10, "llm_loss": None, "phases": {"data": 0.5 * step}}
            metrics.append(row)
            trackers.log(row)
            if step == saved:
                state.write_text(json.dumps(trackers.ids))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not trackers.failed
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]), sys.argv[6:] == ["kill"])
