"""`longspec new`, `plan`, `train` and `report`: a run from its file to its draft, by Snakemake."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

from longspec import methods
from longspec.config import compose_stage, differences, plain, yaml_files
from longspec.config.run_file import CONFIG_DIR, SUFFIX, default_method, read_run
from longspec.report import ending

SNAKEMAKE = [sys.executable, "-m", "snakemake"]  # also where its environment is not activated
TEMPLATE = """\
# {comment}
# All keys: docs/own-model.md. What would run: longspec plan {file}. Train it: longspec train {file}
target: {target}
data: {{{name}: {data}}}
method: {method}
# recipe: {{epochs: 10, optimizer: {{lr: 1.0e-4}}, data: {{sequence_length: 4096}}}}
# evaluation: {{new_tokens: 128}}
"""


def new(options: Namespace) -> int:
    """Write a run's file for a target and its data, and plan it. Raises ValueError where the file is there already."""
    path = options.run
    if path.suffix != SUFFIX:
        raise ValueError(f"{path}: give a file that ends in {SUFFIX}")
    if path.exists():
        raise ValueError(f"{path}: is there already; edit it, or give another name")
    if options.method not in methods.names():
        raise ValueError(f"--method: {options.method!r} is unknown; choose one of {', '.join(methods.names())}")
    served = methods.settings_of(options.method).VLLM_METHOD
    comment = (
        "vLLM and SGLang load this draft." if served else "No engine loads this draft yet; transformers' generate and ours do."
    )
    told = {"target": options.target, "data": options.data, "name": options.name, "method": options.method}
    path.write_text(TEMPLATE.format(comment=comment, file=path, **told), encoding="utf-8")
    print(f"{path}: written")
    return plan(Namespace(run=str(path), snakemake=[]))


def _chosen(options: Namespace) -> list[str]:
    """Return Snakemake's arguments; it takes the last --config alone, so that yours gets the run too."""
    more, chosen = list(options.snakemake), f"run={options.run}"
    if "--config" not in more:
        return ["final_draft", "--config", chosen, *more]
    place = more.index("--config") + 1
    return ["final_draft", *more[:place], chosen, *more[place:]]


def plan(options: Namespace) -> int:
    """Say in some lines what would run: which stages train, and by which keys they differ from what is there."""
    done = subprocess.run([*SNAKEMAKE, "-n", *_chosen(options)], capture_output=True, text=True)
    if done.returncode:
        print(
            "\n".join(
                line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("Using", "Config file"))
            )
        )
        return done.returncode
    text = done.stdout + done.stderr
    for line in text.splitlines():
        if line.startswith(("  disk", "  stored states", "  building them", "states to be", "gates.", "variants:")):
            print(line)
    jobs = re.findall(r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    output: (\S+?),?(?: .*)?$", text, re.MULTILINE)
    if not jobs:
        print("nothing to be done: all files are there and up to date")
        return 0
    for _, output in (job for job in jobs if job[0] == "train"):
        print(_stage(options.run, Path(output).parent))
    method = read_run(options.run, [CONFIG_DIR]).says.method or default_method()
    if methods.settings_of(method).VLLM_METHOD is None:
        print(f"no engine loads {method} drafts; transformers' generate and ours do (docs/generate.md)")
    counted = Counter(rule for rule, _ in jobs)
    print(f"{counted.total()} jobs: " + ", ".join(f"{count} {rule}" if count > 1 else rule for rule, count in counted.items()))
    return 0


def _stage(run: str, folder: Path) -> str:
    """Say of a stage that is to be trained what has changed since its recipe was frozen."""
    frozen = folder / "recipe.yaml"
    if not frozen.is_file():
        return f"{folder}: is trained"
    planned = plain(compose_stage(run, folder.parent.name, folder.name).recipe)
    changed = differences(yaml_files.read(frozen), planned)
    if changed:
        return f"{folder}: is trained again: {'; '.join(changed)}"
    return (
        f"{folder}: goes on" if (folder / "checkpoints").is_dir() else f"{folder}: is trained: what it begins with has changed"
    )


def train(options: Namespace) -> int:
    """Make a run's final draft, and say what came out."""
    command = [*SNAKEMAKE, *_chosen(options)]
    process = subprocess.Popen(command, env=os.environ | {ending.SAID: "1"})
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told Snakemake too
        process.wait()
        print("\nstopped by you; the same command goes on")
        return 130
    return code or report(options)


def report(options: Namespace) -> int:
    """Print what a finished run says. Raises ValueError where there is no report yet."""
    name = Path(options.run).stem if options.run.endswith(SUFFIX) else options.run
    told = ending.lines(name, options.run)
    if not told:
        raise ValueError(f"results/{name}/report.json: no such file; make it first: longspec train {options.run}")
    print("\n".join(told))
    return 0
