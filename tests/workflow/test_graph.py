"""What is built from what, and how each job is called."""

import re
from pathlib import Path

import pytest

from longspec.config import Recipe, Runtime, compose_stage, load, to_yaml
from tests.workflow.planning import Workflow

P = "results/demo/sinkpi-slicing"


def rule_blocks(root: Path) -> dict[str, str]:
    """Each rule's text."""
    text = "\n".join(path.read_text() for path in [root / "Snakefile", *sorted((root / "rules").glob("*.smk"))])
    parts = re.split(r"^rule (\w+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_job_has_a_log_and_a_timing_and_is_one_shell_line(root: Path) -> None:
    blocks = rule_blocks(root)
    assert len(blocks) == 20
    for name, block in blocks.items():
        is_job = name not in ("compare", "final_draft", "preflight")
        assert ("shell:" in block) == is_job
        if is_job:
            assert "\n    log:" in block, name
            assert "\n    benchmark:" in block, name
    everything = "\n".join(blocks.values())
    assert not re.search(r"^    (run:|script:|retries: [^0])|\blambda\b|partition", everything, re.MULTILINE)


def test_each_stage_starts_from_the_draft_of_the_one_before(workflow: Workflow) -> None:
    plan = workflow.plan()
    assert "draft" not in plan[f"{P}/base/checkpoint.json"]["input"]
    assert "--init-weights" not in plan[f"{P}/base/checkpoint.json"]["command"]
    for before, stage in (("base", "long"), ("long", "longcot")):
        weights = f"{P}/{before}/draft/model.safetensors"
        job = plan[f"{P}/{stage}/checkpoint.json"]
        assert weights in job["input"]
        assert f"--init-weights {weights}" in job["command"]


def test_the_demo_evaluates_both_baselines_and_every_stage(workflow: Workflow) -> None:
    plan = workflow.plan()
    jobs = {path: job["command"] for path, job in plan.items() if job["rule"] == "evaluate"}
    assert set(jobs) == {f"{P}/evaluation/{name}.jsonl" for name in ("untrained", "lookup", "base", "long", "longcot")}
    assert "--drafter lookup --recipe" in jobs[f"{P}/evaluation/lookup.jsonl"]
    assert f"--drafter long --draft {P}/long/draft --recipe" in jobs[f"{P}/evaluation/long.jsonl"]
    assert "--raw puzzles=data/raw/puzzles/manifest.json stdlib=" in jobs[f"{P}/evaluation/untrained.jsonl"]


def test_a_benchmarks_file_is_read_by_the_evaluation_alone(workflow: Workflow) -> None:
    workflow.edit("config/workflow.yaml", r"\bcot: \{.*\}", "cot: {preset: gsm8k, source: 'in/*.jsonl'}")
    (workflow.folder / "in").mkdir()
    (workflow.folder / "in/gsm8k.jsonl").touch()
    plan = workflow.plan()
    readers = {job["rule"] for job in plan.values() if "in/gsm8k.jsonl" in job.get("input", "")}
    assert readers == {"evaluate"}
    command = plan[f"{P}/evaluation/lookup.jsonl"]["command"]
    assert "put your final answer within" in command
    assert "--raw stdlib=data/raw/stdlib/manifest.json stdlib-long=" in command
    assert "data/raw/puzzles/manifest.json" in plan["results/demo/report.html"]["input"]  # still trained on


def test_the_draft_is_done_when_its_gates_hold(workflow: Workflow) -> None:
    """The check reads the report, so that the page is there when a gate fails."""
    assert workflow.plan()["results/demo/gates.json"]["input"] == "results/demo/report.html, results/demo/report.json"


def test_the_tokenizer_and_the_target_read_the_mixture_whatever_the_stages_read(workflow: Workflow) -> None:
    workflow.edit("config/run_stage/demo_long.yaml", "name: stdlib-long", "name: own")
    workflow.edit("config/workflow.yaml", "^  stdlib: ", "  own: {source: stdlib, held_out: 0.1, shards: 2}\n  stdlib: ")
    plan = workflow.plan()
    names = ("puzzles", "stdlib", "stdlib-long")
    read = {f"data/raw/{name}/manifest.json" for name in names} | {"models/demo/build.yaml"}
    assert set(plan["models/demo/tokenizer_manifest.json"]["input"].split(", ")) == read
    mixture = compose_stage("demo", "sinkpi-slicing", "base").build.mixture
    expected = {f"{phase.dataset}-base-{phase.sequence_length}-split" for phase in mixture}
    target = plan["models/demo/target_manifest.json"]["input"]
    assert set(re.findall(r"data/packed/demo/([^/]+)/", target)) == expected


@pytest.mark.parametrize(("ranks", "cores"), [(1, 2), (2, 2)])
def test_ranks_are_a_resource(workflow: Workflow, ranks: int, cores: int) -> None:
    plan = workflow.plan(f"--cores={cores}", "--set-resources", f"train:ranks={ranks}")
    command = plan[f"{P}/base/checkpoint.json"]["command"]
    assert f"--nodes 1 --ranks {ranks} --tasks 1 --cpus {cores} --gres= " in command


def test_the_slurm_profile_gives_a_stage_a_node_of_eight_gpus(workflow: Workflow) -> None:
    workflow.edit("config/run_stage/demo_long.yaml", "global_batch: 2", "global_batch: 64")
    plan = workflow.plan("--profile", "slurm")
    resources = plan[f"{P}/long/checkpoint.json"]["resources"]
    for wish in ("nodes=1", "gres=gpu:8", "ranks=8", "tasks_per_node=8", "cpus_per_task=8", "mpi=srun", "slurm_partition=gpu"):
        assert wish in resources
    assert "--ranks 8 --tasks 8 --cpus 8 --gres=gpu:8" in plan[f"{P}/long/checkpoint.json"]["command"]
    shard = plan["data/tokens/demo/stdlib/000.json"]
    assert "slurm_partition=cpu" in shard["resources"]
    assert "cpus_per_task=8" in shard["resources"]
    assert shard["command"].startswith("RAYON_NUM_THREADS=8 ")


def test_only_what_fetches_may_ask_the_internet(workflow: Workflow) -> None:
    """As the user's own environment says; a question from a compute node would hang."""
    workflow.edit("config/workflow.yaml", r"^runs: \[.*?\]", "runs: [published]")
    for job in workflow.plan("--profile", "slurm").values():
        fetches = job["rule"].startswith("fetch_")
        assert job["command"].startswith("HF_HUB_OFFLINE=$FETCH_OFFLINE ") == fetches
    probe = workflow.folder / "probe.smk"
    probe.write_text(
        'include: "Snakefile"\nrule probe:\n    output: "probe.txt"\n'
        '    shell: "echo $HF_HUB_OFFLINE $FETCH_OFFLINE > {output}"\n'
    )
    workflow.output("--snakefile", "probe.smk", "--cores=1", "probe.txt")
    assert (workflow.folder / "probe.txt").read_text() == "1 0\n"


def test_frozen_files_hold_what_was_composed(workflow: Workflow) -> None:
    folder = f"{P}/long"
    workflow.output("--cores=1", f"{folder}/recipe.yaml", f"{folder}/runtime.yaml")
    config = compose_stage("demo", "sinkpi-slicing", "long")
    for section, schema in (("recipe", Recipe), ("runtime", Runtime)):
        path = workflow.folder / folder / f"{section}.yaml"
        assert path.read_text() == to_yaml(config[section])
        assert load(path, schema) == config[section]


def test_a_published_run_fetches_its_target_and_the_published_data(workflow: Workflow) -> None:
    workflow.edit("config/workflow.yaml", r"^runs: \[.*?\]", "runs: [published]")
    plan = workflow.plan()
    rules = [job["rule"] for job in plan.values()]
    assert "fetch_target" in rules
    assert not {"build_config", "build_tokenizer", "train_target"} & set(rules)
    assert "hf:Qwen/QwQ-32B" in plan["models/qwq-32b/target_manifest.json"]["command"]
    fetched = {
        "slimpajama": "'hf:DKYoon/SlimPajama-6B/data/train-*.parquet' --revision=b5f90f419b7489cdba26fdbc8c022fcb5562f968",
        "long-data": "hf:sail/longspec-data/long_data.jsonl --revision=main",
        "longcot": "'hf:amphora/QwQ-LongCoT-130K/data/train-*.parquet' --revision=cb5624e9a538259c5f5ed9d5869f7a2565606e38",
    }
    for name, source in fetched.items():
        manifest = f"data/hub/{name}/manifest.json"
        assert f"fetch --source={source} --out {manifest}" in plan[f"{manifest} (update)"]["command"]
        assert plan[f"data/raw/{name}/manifest.json"]["input"] == manifest
        assert f" --fetched {manifest} --out" in plan[f"data/raw/{name}/manifest.json"]["command"]
    packed = "data/packed/qwq-32b/long-data-long-nomask-32768-truncate/manifest.json"
    assert packed in plan["results/published/sinkpi-slicing/long/checkpoint.json"]["input"]


def test_a_published_run_reads_the_users_files(workflow: Workflow) -> None:
    workflow.edit("config/workflow.yaml", r"^runs: \[.*?\]", "runs: [published]")
    workflow.edit("config/workflow.yaml", "slimpajama: .*", "slimpajama: {source: in/*.jsonl.gz, shards: 4}")
    workflow.edit("config/workflow.yaml", "long-data: .*", "long-data: {source: [in/b.parquet, in/a.json], shards: 2}")
    workflow.edit("config/workflow.yaml", "longcot: .*", "longcot: {preset: qwq-longcot-130k, source: in/b.parquet, shards: 2}")
    (workflow.folder / "in").mkdir()
    for name in ("2.jsonl.gz", "1.jsonl.gz", "a.json", "b.parquet"):
        (workflow.folder / "in" / name).touch()
    plan = workflow.plan()
    assert "fetch_data" not in {job["rule"] for job in plan.values()}
    assert plan["data/raw/slimpajama/manifest.json"]["input"] == "in/1.jsonl.gz, in/2.jsonl.gz"
    assert plan["data/raw/long-data/manifest.json"]["input"] == "in/a.json, in/b.parquet"
    assert "--fetched" not in plan["data/raw/longcot/manifest.json"]["command"]
    assert "revision" not in plan["data/raw/longcot/manifest.json"]["command"]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 1), (4, 2), (16, 8)])
def test_a_dataset_is_tokenized_by_one_job_a_shard_and_by_all_cores(workflow: Workflow, cores: int, threads: int) -> None:
    plan = workflow.plan(f"--cores={cores}")
    jobs = {path: job for path, job in plan.items() if job["rule"] == "tokenize"}
    names = ("stdlib", "stdlib-long", "puzzles")
    assert set(jobs) == {f"data/tokens/demo/{name}/{shard:03d}.json" for name in names for shard in range(2)}
    for path, job in jobs.items():
        assert job["command"].startswith(f"RAYON_NUM_THREADS={threads} python -m longspec.data tokenize")
        assert f"--shard {path[-8:-5]} --num-shards 2 --out {path}" in job["command"]
        assert job.get("threads", "1") == str(threads)


def test_graph_summary_and_lint_work(workflow: Workflow) -> None:
    edges = workflow.output("final_draft", "--rulegraph")
    assert 25 < edges.count("->") < 50
    assert "model: demo" in workflow.output("final_draft", "--dag")
    assert f"{P}/base/metrics.jsonl" in workflow.output("final_draft", "--summary")
    assert "good condition" in workflow.output("--lint")
