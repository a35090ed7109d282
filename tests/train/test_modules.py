"""How much of the house one training step loads: what a person must know who reads it."""

import json
import subprocess
import sys

import pytest

from tests.jobs import MakeJob

MOST = 90  # modules of ours, their packages among them
PROGRAM = """
import json, sys
from longspec.train import __main__ as loop

def end(code):
    print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "longspec")))
    sys.exit(code)

loop.end_at_once = end
loop.main()
"""


@pytest.mark.slow
def test_a_training_step_loads_few_modules(make_job: MakeJob) -> None:
    """Counted when the job has ended, so that a module which is imported late counts too."""
    job = make_job("counted", ["recipe.steps=1"])
    job.freeze()
    options = job.command()[len(job.launcher) + 2 :]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *options], text=True, capture_output=True, cwd=job.out)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert len(loaded) <= MOST, "\n".join(loaded)
