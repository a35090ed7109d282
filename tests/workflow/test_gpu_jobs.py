"""On a workstation with GPUs one job that uses them runs at a time (profiles/default); elsewhere nothing holds jobs back."""

import re
import subprocess
import sys
from pathlib import Path

DEVICE = "/dev/nvidiactl"
# Each fails where another is running.
SNAKEFILE = """
rule both:
    input: "a", "b"
rule one:
    output: "{name}"
    resources: gpu_jobs=1
    shell: "mkdir running; sleep 1; rmdir running; touch {output}"
"""


def test_one_job_runs_at_a_time_where_a_gpu_is_seen(tmp_path: Path, root: Path) -> None:
    profile = (root / "profiles/default/profile.yaml").read_text()
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/profile.yaml").write_text(profile.replace(DEVICE, str(tmp_path / "device")))
    (tmp_path / "device").touch()
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profile", "--cores", "2", "both"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gpu_jobs=1" in done.stderr


def test_every_rule_whose_jobs_ask_for_gpus_is_one_of_these(root: Path) -> None:
    wanted = {"train", "build_states", "answer", "evaluate", "evaluate_bench"}
    found = set()
    for file in sorted((root / "rules").glob("*.smk")):
        for rule in re.split(r"^(?=rule |use rule )", file.read_text(), flags=re.MULTILINE):
            if re.search(r"^ {8}gres=", rule, re.MULTILINE) and "gpu_jobs=1," in rule:
                found.add(re.match(r"(?:use )?rule (?:\w+ as )?(\w+)", rule)[1])  # type: ignore[index]
            elif re.search(r"^ {8}gres=", rule, re.MULTILINE):
                assert rule.startswith("rule preflight"), rule
    assert found == wanted
