"""A checkpoint that DeepSpeed itself wrote is refused, and what the refusal says to type makes a draft of it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.draft.conftest import Extract
from tests.jobs import PLAIN, finish, start


def test_what_a_deepspeed_checkpoint_is_refused_with_works(extract: Extract, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "state.pth")
    saved = tmp_path / "saved"
    program = ["-m", "tests.draft.deepspeed_program", str(tmp_path / "state.pth"), str(saved)]
    text, code = finish(start([*PLAIN, *program], tmp_path))
    assert code == 0, text[-5000:]
    for folder in (saved, saved / "tag"):
        with pytest.raises(SystemExit, match=r"is a checkpoint of DeepSpeed's own, whose pickles may run code") as refusal:
            extract(folder)
    advice = str(refusal.value).split("such as python ")[1].split(", and give")[0]
    done = subprocess.run([sys.executable, *shlex.split(advice)], cwd=saved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = extract(saved / "weights/model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
