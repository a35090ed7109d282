# What a stage's job asks a cluster for: processes that can share its batch; memory and minutes by the estimate from its
# recipe, target and rows, as soon as these are there, within what the profile allows. Without a profile it has the rule's own.

import subprocess
import tempfile

from snakemake.logging import logger

from longspec.train.estimate.grad_accum import sharing_ranks

ESTIMATE = [sys.executable, "-m", "longspec.train", "plan", "--json"]
# set-resources of `train` in the profile
TRAIN = {
    name: str(value.raw)
    for name, value in workflow.resource_settings._parsed_overwrite_resources.get(
        "train", {}
    ).items()
}
LIMITS = {"nodes": 1, "ranks": 1, "node_mem": 8000, "longest_job": 240, "tflops": 0}
with told_in_one_line():
    for name in LIMITS.keys() & TRAIN.keys():
        if not TRAIN[name].isdecimal():
            raise ValueError(
                f"set-resources: train: {name}: {TRAIN[name]} is no whole number; profiles/slurm/profile.yaml tells its unit"
            )
        LIMITS[name] = int(TRAIN[name])
estimates = {}


def check_training_block():
    """Refuse a profile's block of `train` that the command line has taken the place of, with a GPU's job in it."""
    if TRAIN and "ranks" not in TRAIN:
        raise ValueError(
            f"--set-resources train:{next(iter(TRAIN))}=... takes the place of all that the profile sets for train, GPUs "
            "included. Change profiles/slurm/profile.yaml instead, or give a folder with another one: --workflow-profile"
        )


# With `input` among its arguments Snakemake does not take the number for a setting whose change trains anew.
def stage_ranks(wildcards, input):
    """Processes on each node."""
    recipe = CONFIGS[wildcards.run, wildcards.variant, wildcards.stage].recipe
    return sharing_ranks(recipe.global_batch, LIMITS["nodes"], LIMITS["ranks"])


def estimate(wildcards, input):
    """Memory and minutes of a job, from a process of its own: torch stays out of the one that controls the jobs. None when
    the profile wants no estimate, there is nothing to estimate from yet, or it fails: then the limits themselves stand.
    """
    files = [Path(input.target), Path(input.data)]
    if (
        not LIMITS["tflops"]
        or not workflow.is_main_process
        or not all(path.is_file() for path in files)
    ):
        return None
    key = (*wildcards, *(path.stat().st_mtime_ns for path in files))
    if key in estimates:
        return estimates[key]
    stage = "-".join(wildcards)
    cfg = CONFIGS[wildcards.run, wildcards.variant, wildcards.stage]
    ranks = stage_ranks(wildcards, input)
    with tempfile.TemporaryDirectory() as folder:
        command = [*ESTIMATE, "--target", input.target, "--data", input.data]
        for section in ("recipe", "runtime"):
            Path(folder, section).write_text(to_yaml(cfg[section]))
            command += [f"--{section}", f"{folder}/{section}"]
        command += ["--ranks", LIMITS["nodes"] * ranks, "--node-gpus", ranks]
        command += ["--longest-job", LIMITS["longest_job"]]
        command += ["--flops", LIMITS["tflops"] * 1e12]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    try:
        estimates[key] = json.loads(done.stdout)[0]
    except ValueError:
        estimates[key] = None
        said = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        logger.warning(
            f"{stage}: its job asks for node_mem and longest_job, an estimate failed: {said}"
        )
    else:
        if estimates[key]["memory_mb"] > LIMITS["node_mem"]:
            logger.warning(
                f"{stage} needs {estimates[key]['memory_mb']} MB of each node by its estimate, the profile has "
                f"node_mem: {LIMITS['node_mem']}, which its job asks for. If it is killed: more nodes, or less on the host "
                "(runtime.deepspeed)"
            )
    return estimates[key]


def stage_memory(wildcards, input, attempt):
    """MB of each node; more in each try."""
    needs = estimate(wildcards, input)
    return (
        LIMITS["node_mem"]
        if needs is None
        else min(LIMITS["node_mem"], needs["memory_mb"] * attempt)
    )


def stage_minutes(wildcards, input, attempt):
    """Minutes of one job, more in each try; a longer stage goes on in the next."""
    needs = estimate(wildcards, input)
    return (
        LIMITS["longest_job"]
        if needs is None
        else min(LIMITS["longest_job"], needs["minutes"] * attempt)
    )
