# Memory and minutes of a stage's job on a cluster: from its recipe, target and data, as soon as these are there, within what
# the profile allows (set-resources of `train`: node_mem, longest_job, tflops). Without a profile a stage has the rule's own.

from longspec.cluster.ranks import sharing_ranks

LIMITS = {"nodes": 1, "ranks": 1, "node_mem": 8000, "longest_job": 240, "tflops": 0}
for name, value in workflow.resource_settings._parsed_overwrite_resources.get(
    "train", {}
).items():
    if name in LIMITS:
        if not str(value.raw).isdecimal():
            raise WorkflowError(
                f"set-resources: train: {name}: {value.raw} is no whole number; profiles/slurm/profile.yaml tells its unit"
            )
        LIMITS[name] = int(value.raw)
needs_by_stage = {}


def stage_ranks(wildcards, resources):
    """Processes on each node."""
    recipe = CONFIGS[wildcards.run, wildcards.variant, wildcards.stage].recipe
    return sharing_ranks(recipe.global_batch, resources.nodes, resources.ranks)


def stage_needs(wildcards, input):
    """Needs of one job; None where the profile asks for no estimate, or before there is anything to estimate from."""
    files = [Path(input.target), Path(input.data)]
    if (
        not LIMITS["tflops"]
        or not workflow.is_main_process
        or not all(path.is_file() for path in files)
    ):
        return None
    key = (*wildcards, *(path.stat().st_mtime_ns for path in files))
    if key not in needs_by_stage:
        # Torch comes with it: seconds that only a call with something to estimate takes.
        from longspec.train.plan import stage_needs as estimated

        cfg = CONFIGS[wildcards.run, wildcards.variant, wildcards.stage]
        batch = cfg.recipe.global_batch
        ranks = sharing_ranks(batch, LIMITS["nodes"], LIMITS["ranks"])
        needs_by_stage[key] = estimated(cfg, *files, LIMITS | {"ranks": ranks})
    return needs_by_stage[key]


def stage_memory(wildcards, input):
    """MB of each node."""
    needs = stage_needs(wildcards, input)
    if needs is None:
        return LIMITS["node_mem"]
    if needs.memory_mb > LIMITS["node_mem"]:
        raise WorkflowError(
            f"{'/'.join(wildcards)} needs {needs.memory_mb} MB of each node by its estimate, and the profile has node_mem: "
            f"{LIMITS['node_mem']}. Give the optimizer less of the host (runtime.deepspeed), the stage more nodes, or "
            "correct node_mem in profiles/slurm/profile.yaml"
        )
    return needs.memory_mb


def stage_minutes(wildcards, input):
    """Minutes of one job; a longer stage goes on in the next."""
    needs = stage_needs(wildcards, input)
    return LIMITS["longest_job"] if needs is None else needs.minutes
