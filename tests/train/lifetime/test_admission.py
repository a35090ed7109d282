"""A stage's folder speaks against a job: checkpoints of other settings, a status of a failure that stays."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.train.checkpoint import checkpoint_dir
from longspec.train.lifetime.admission import find_resumable, non_retryable_reason, refuse_changed
from tests.train.checkpoint.test_save_load import write_slot

BEGAN = 1000.0


def test_another_identity_is_refused_until_the_stage_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find_resumable(folder, {"recipe": {"lr": 1}}) is None
    write_slot(folder / "last", 20)
    assert find_resumable(folder, {"recipe": {"lr": 1}})[1]["step"] == 20
    with pytest.raises(ValueError, match=r"step 20 of 100.*recipe\.lr: 1 -> 2"):
        find_resumable(folder, {"recipe": {"lr": 2}})
    write_slot(folder / "damaged", 100)
    (folder / "last").rename(folder / "last_2")
    (folder / "damaged").rename(folder / "last")
    assert find_resumable(folder, {"recipe": {"lr": 2}}) is None
    assert len(list(tmp_path.glob("checkpoints.*/last"))) == 1


@pytest.mark.parametrize(("step", "refused"), [(3, True), (9, False)])
def test_a_changed_recipe_is_refused_from_the_manifest_alone(tmp_path: Path, step: int, refused: bool) -> None:
    """Before a target is loaded; a finished stage is set aside later, and a damaged manifest is told later."""
    content = {"step": step, "steps": 9, "identity": {"recipe": {"seed": 1}}, "files": {"gone": {}}}
    refuse_changed(tmp_path, {"recipe": {"seed": 2}})
    write_json(tmp_path / "last_2" / checkpoint_dir.MANIFEST, checkpoint_dir.seal(content))
    write_json(tmp_path / "last" / checkpoint_dir.MANIFEST, {"torn": True})
    refuse_changed(tmp_path, {"recipe": {"seed": 1}})
    if refused:
        with pytest.raises(ValueError, match=r"step 3 of 9\) were made with other settings: recipe.seed: 1 -> 2\. Undo"):
            refuse_changed(tmp_path, {"recipe": {"seed": 2}})
    else:
        refuse_changed(tmp_path, {"recipe": {"seed": 2}})


@pytest.mark.parametrize(
    ("status", "time", "expected"),
    [
        ({"state": "failed", "deterministic": True, "reason": "no such key"}, BEGAN, "no such key"),
        ({"state": "failed", "deterministic": True, "reason": "mended since"}, BEGAN - 1, ""),
        ({"state": "failed", "deterministic": False, "reason": "a rank was lost"}, BEGAN, ""),
        ({"state": "stopped", "deterministic": False, "reason": "deadline"}, BEGAN, ""),
        ({"state": "failed"}, BEGAN, ""),
        ([], BEGAN, ""),
    ],
)
def test_what_would_fail_in_the_same_way_again_is_told_with_its_reason(
    tmp_path: Path, status: Any, time: float, expected: str
) -> None:
    write_json(tmp_path / "status.json", status)
    os.utime(tmp_path / "status.json", (time, time))
    assert non_retryable_reason(tmp_path, BEGAN) == expected


def test_nothing_and_a_torn_file_tell_no_reason(tmp_path: Path) -> None:
    assert non_retryable_reason(tmp_path, BEGAN) == ""
    (tmp_path / "status.json").write_text('{"state": "fai')
    assert non_retryable_reason(tmp_path, BEGAN) == ""


def test_rules_and_reports_ask_without_torch() -> None:
    program = "import sys, longspec.train.lifetime.admission; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
