"""Write a run's file for a target and its data, plan it, and say what it will cost on this machine."""

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path
from shlex import join

import torch
import yaml
from torch.utils.benchmark import Timer

from longspec import methods
from longspec.cli.runs import plan, plan_of
from longspec.config import CONFIG_DIR
from longspec.config.names import HUB_PREFIX, checked_name, is_gguf
from longspec.config.run_file import SUFFIX
from longspec.config.target_facts import facts_of
from longspec.data.raw import is_hub, is_made
from longspec.data.read import source_files
from longspec.engines import VLLM
from longspec.shown import duration
from longspec.train.estimate.memory import estimate, gib, memory_of, peak
from longspec.train.estimate.plan import TYPICAL_FLOPS, plan_stage, read_target, whole_rows
from longspec.workflow.jobs.resources import STAGE_THREADS, ranks_for

TEMPLATE = """\
# yaml-language-server: $schema={schema}
# {comment}
# All keys: docs/configuration.md. What would run: longspec plan {file}
# Train it: longspec train {file}; on several GPUs: docs/one-box.md
target: {target}
data: {{{name}: {data}}}
method: {method}
# recipe: {{epochs: 10, optimizer: {{lr: 1.0e-4}}, data: {{sequence_length: 4096}}}}
# evaluation: {{prompts: 40, new_tokens: 24, shapes: [4]}}
"""
PLAIN = ((".jsonl", ""), (".json", ""))  # kinds of files
BYTES = 4  # of a token, as long as no tokenizer is asked
SIZE = 1024  # side of the matrices whose product measures a processor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `new`."""
    parser.add_argument("run", type=Path, help="the file to write, such as mine.yaml")
    parser.add_argument("--target", required=True, help="hf:<owner>/<repository>, a folder or a .gguf file")
    parser.add_argument("--data", required=True, help="a file, a glob in quotes, or hf:<owner>/<name>")
    parser.add_argument("--method", default="eagle3", choices=methods.names(), help="default: eagle3")


def run(options: argparse.Namespace) -> int:
    """Write the file, plan it and print its cost; return the plan's exit code. Raises ValueError if the file is there."""
    path = options.run
    if path.suffix != SUFFIX:
        raise ValueError(f"{path}: give a file that ends in {SUFFIX}")
    checked_name(path.stem, key=f"{path}: a run has its file's name")
    if path.exists():
        raise ValueError(f"{path}: is there already; edit it, or give another name")
    if (CONFIG_DIR / f"model/{options.target}.yaml").is_file():
        raise ValueError(f"--target: {options.target}: is a file of config/model/; write it into a run by hand")
    served = methods.settings_of(options.method).SERVED.get(VLLM)
    comment = "No engine loads this draft yet; transformers' generate and ours do."
    if served is not None:
        comment = f"vLLM loads this draft{'' if served.layout is None else ', with the plugin in plugins/vllm'}."
    texts = {"target": options.target, "name": f"{path.stem}-data", "data": options.data, "method": options.method}
    told = {key: scalar(text) for key, text in texts.items()}
    schema = CONFIG_DIR / "run.schema.json"
    path.write_text(TEMPLATE.format(comment=comment, file=path, schema=schema, **told), encoding="utf-8")
    print(f"{path}: written")
    code = plan(argparse.Namespace(run=str(path), snakemake=[]))
    if code:
        print(f"edit {path}; then: longspec plan {path}")
    else:
        print("\n".join(cost_lines(path, options.target, options.data)))
    return code


def scalar(text: str) -> str:
    """Return a text as YAML's flow style reads it: unquoted if that works, else in quotes."""
    with suppress(yaml.YAMLError):
        if yaml.safe_load(f"{{a: {text}}}") == {"a": text}:
            return text
    return json.dumps(text, ensure_ascii=False)


def cost_lines(path: Path, target: str, data: str) -> list[str]:
    """Return what was found of target and data, and the hours, memory and disk on this machine, as far as they are known."""
    facts = facts_of(target, path)
    sizes = {"layers": facts.layers, "tokens": facts.tokens, "positions": facts.positions}
    told = "".join(f", {size:,} {name}" for name, size in sizes.items() if size is not None)
    config, gpus = next(iter(plan_of(str(path)).configs.values())), torch.cuda.device_count()
    ranks = ranks_for([config], gpus)
    command = ["longspec", "train", str(path), *(["--set-resources", f"train:ranks={ranks}"] if ranks > 1 else [])]
    end, lines = f"train it: {join(command)}", [f"target: {facts.family}{told}"]
    files = [] if is_hub(data) or is_made(data) else source_files.files_of(data)
    if not files or any(source_files.kind_of(file) not in PLAIN for file in files):
        return [*lines, "time and disk: not known before data of the hub, Parquet and compressed files are packed", end]
    size = sum(file.stat().st_size for file in files)
    recipe, length = config.recipe, config.recipe.data.sequence_length
    rows = max(recipe.global_batch, size // BYTES // length)
    lines.append(f"data: about {size // BYTES:,} tokens, at {BYTES} bytes each: {rows:,} rows of {length:,} tokens")
    if is_gguf(target):
        return [*lines, "time and memory: known once the target's folder is made of it", end]
    try:
        read = read_target(target.removeprefix(HUB_PREFIX))
    except ValueError as error:
        return [*lines, f"time and memory: known once the target is here ({error})", end]
    device = torch.device("cuda" if gpus else "cpu")
    planned = plan_stage(read, recipe, config.runtime, [whole_rows(rows, length)], ranks, device)
    rate, machine = _machine(ranks, gpus)
    needed, there = peak(estimate(planned.setup)), memory_of(device)
    each, owner = ("GPU", "it") if device.type == "cuda" else ("process", "this machine")
    fits = "fits" if needed <= there else "DOES NOT FIT: docs/large-targets.md"
    return [
        *lines,
        f"time: {planned.steps:,} steps, about {duration(3600 * planned.hours(rate))} on {machine}; answers, states and the "
        "evaluation come on top",
        f"memory: {gib(needed)} of each {each}, of {gib(there)} that {owner} has: {fits}",
        f"disk: {gib(planned.disk)} of checkpoints and draft, and about {gib(3 * size)} of tokens and rows",
        end,
    ]


def _machine(ranks: int, gpus: int) -> tuple[float, str]:
    """Return the operations per second of one rank, and the machine in words. A processor is measured, a GPU is not."""
    if gpus:
        return TYPICAL_FLOPS, f"{ranks} of {gpus} GPUs, each taken for one of {TYPICAL_FLOPS / 1e12:.0f} TFLOP/s"
    threads, square = min(STAGE_THREADS, os.cpu_count() or 1), torch.ones(SIZE, SIZE)
    timer = Timer("square @ square", globals={"square": square}, num_threads=threads)
    rate = 2 * SIZE**3 / timer.timeit(4).mean
    return rate, f"{threads} threads of this processor ({rate / 1e12:.2f} TFLOP/s measured)"
