"""Tell what Snakemake does not notice: another target, another build or another data set under a name that is taken."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from longspec.atomic_files import read_json
from longspec.data.raw import is_hub
from longspec.workflow import paths
from longspec.workflow.plan import Plan

ANEW = "and all that follows are made again"


def unnoticed(plan: Plan, bench: Plan) -> list[str]:
    """Return a line for each change of targets and data sets that Snakemake does not notice, and if it notices none.

    bench: what is measured apart.
    """
    lines = []
    if any(Path("results").glob("*/*/*/recipe.yaml")) and not any(Path(".snakemake/metadata").glob("*")):
        lines.append("results/: .snakemake/ is missing, so no edit of a run is noticed; copy it, or remove its results")
    return [*lines, *_targets(plan), *_records(plan, {*plan.datasets_in_use(), *bench.datasets_in_use()})]


def _targets(plan: Plan) -> Iterator[str]:
    for model in plan.built:
        build = Path(paths.BUILD.format(model=model))
        if build.is_file() and build.read_text(encoding="utf-8") != plan.build_yaml(model):
            yield f"{build}: is of another build; the target {ANEW}. If another run has it, give one a recipe.model.name"
    for model in (*plan.fetched, *plan.of_gguf):
        with suppress(OSError, ValueError, KeyError):  # not here yet, or damaged: its job will find that
            made = read_json(manifest := Path(paths.TARGET.format(model=model)))
            files, rule = [Path(made["path"]) / name for name in made["files"]], "fetch_target"
            if model in plan.of_gguf:  # a wheel's file is not here
                files, rule = [Path(plan.model_source(model)).expanduser()], "dequantize_target"
            if newer := [str(path) for path in files if path.stat().st_mtime > manifest.stat().st_mtime]:
                yield f"{newer[0]}: is newer than {manifest}; if the target is another one now: -R {rule}"


def _records(plan: Plan, used: set[str]) -> Iterator[str]:
    for name in sorted(used):
        source = held = plan.data[name]["source"]
        with suppress(OSError, ValueError, KeyError):  # missing or damaged: its job will find that
            made = read_json(manifest := Path(paths.RAW.format(dataset=name)))
            held = made["settings"]["source"]
            for path, told in {} if is_hub(source) else made["inputs"].items():
                now = Path(path).stat()
                if now.st_size != told["bytes"] and now.st_mtime < manifest.stat().st_mtime:
                    yield f"data.{name}: {path}: the records here are of another file of this name; touch it"
        if held != source:
            yield (
                f"data.{name}: its records here are of {held}; they {ANEW}, of {source}. "
                "If another run has data of this name, rename one of the two"
            )
