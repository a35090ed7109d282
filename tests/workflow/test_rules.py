"""The text of rules: every placeholder quoted, so that no path and no name is read as a command; which jobs share a GPU."""

import os
import re
from pathlib import Path

from longspec.config import compose_stage, to_yaml
from tests.workflow.planning import copy_to
from tests.workflow.warm import snakemake

PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}(?!\})")
# Several options with their values, made of names alone (longspec.config.names).
OPTIONS = {"params.variants"}


def shell_texts(path: Path) -> list[str]:
    """The commands of a file's rules: the lines below each `shell:`."""
    lines, found = path.read_text().splitlines(), []
    for number, line in enumerate(lines):
        if line == "    shell:":
            rest = lines[number + 1 :]
            end = next((at for at, below in enumerate(rest) if not below.startswith(" " * 8)), len(rest))
            found.append("\n".join(rest[:end]))
    return found


def test_every_placeholder_of_every_command_is_quoted(root: Path) -> None:
    texts = {path.name: shell_texts(path) for path in (root / "rules").glob("*.smk")}
    written = sum(path.read_text().count("shell:\n") for path in (root / "rules").glob("*.smk"))
    assert sum(map(len, texts.values())) == written >= 16
    placeholders = [(name, each) for name, found in texts.items() for text in found for each in PLACEHOLDER.findall(text)]
    assert len(placeholders) > 80
    assert [each for each in placeholders if not each[1].endswith(":q") and each[1] not in OPTIONS] == []


def rule_blocks(root: Path) -> dict[str, str]:
    """Each rule's text."""
    text = "\n".join(path.read_text() for path in [root / "Snakefile", *sorted((root / "rules").glob("*.smk"))])
    parts = re.split(r"^(?:rule|use rule \w+ as) (\w+)(?: with)?:$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_job_has_a_log_and_is_one_shell_line(root: Path) -> None:
    blocks = rule_blocks(root)
    assert len(blocks) == 35
    text = "\n".join(path.read_text() for path in (root / "rules").glob("*.smk"))
    for name, block in blocks.items():
        is_job = name not in ("bench", "compare", "final_draft", "preflight", "serves")
        uses_another = f" as {name} with:" in text
        assert ("shell:" in block) == (is_job and not uses_another), name
        if is_job:
            assert "\n    log:" in block, name
    for original, name in re.findall(r"^use rule (\w+) as (\w+) with:$", text, re.MULTILINE):
        assert ("localrule: True" in blocks[name]) == ("localrule: True" in blocks[original]), "Snakemake takes it not over"
    # A rule's own retries would be repeated inside one Slurm job too, and multiply: they stand in the profile alone.
    assert re.search(r"^retries: (5\d|[6-9]\d|\d{3,})", (root / "profiles/slurm/profile.yaml").read_text(), re.MULTILINE)
    everything = "\n".join(blocks.values())
    assert not re.search(r"^    (run:|script:|retries: [^0])|\blambda\b|partition", everything, re.MULTILINE)


def test_a_clone_in_a_folder_of_any_name_builds(tmp_path: Path, root: Path) -> None:
    clone = tmp_path / 'it\'s a "clone" $(touch INJECTED) & more'
    clone.mkdir()
    workflow = copy_to(clone, root)
    recipe = "results/demo/sinkpi-slicing/base/recipe.yaml"
    workflow.output("--cores=1", recipe)
    assert (clone / recipe).read_text() == to_yaml(compose_stage("demo", "sinkpi-slicing", "base").recipe)
    assert not list(tmp_path.rglob("INJECTED"))


# On a workstation with GPUs one job that uses them runs at a time (profiles/default); elsewhere nothing holds jobs back.

DEVICE = "/dev/nvidiactl"
# Each fails where another is running.
SNAKEFILE = """
rule both:
    input: "a", "b"
rule one:
    output: "{name}"
    resources: gpu_jobs=1
    shell: "mkdir running; sleep 0.5; rmdir running; touch {output}"
"""


def test_one_job_runs_at_a_time_where_a_gpu_is_seen(tmp_path: Path, root: Path) -> None:
    profile = (root / "profiles/default/profile.yaml").read_text()
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/profile.yaml").write_text(profile.replace(DEVICE, str(tmp_path / "device")))
    (tmp_path / "device").touch()
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    done = snakemake(["--workflow-profile", "profile", "--cores", "2", "both"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert "gpu_jobs=1" in done.stderr


def test_every_rule_whose_jobs_ask_for_gpus_is_one_of_these(root: Path) -> None:
    wanted = {"train", "build_states", "answer", "evaluate"}
    found = set()
    for file in sorted((root / "rules").glob("*.smk")):
        for rule in re.split(r"^(?=rule |use rule )", file.read_text(), flags=re.MULTILINE):
            if re.search(r"^ {8}gres=", rule, re.MULTILINE) and "gpu_jobs=1," in rule:
                found.add(re.match(r"(?:use )?rule (?:\w+ as )?(\w+)", rule)[1])  # type: ignore[index]
            elif re.search(r"^ {8}gres=", rule, re.MULTILINE):
                assert rule.startswith("rule preflight"), rule
    assert found == wanted
