"""Serve a run's target and draft by vLLM, after `snakemake serves` has measured the draft in each engine that is installed.

For llama.cpp it prints the commands to type. Options of vLLM stand behind --, such as: longspec serve mine.yaml -- --port 8000
"""

import argparse
import json
import os
from pathlib import Path
from shlex import join
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from longspec import methods
from longspec.atomic_files import read_json
from longspec.cli.runs import plan_of, snakemake
from longspec.config.names import is_gguf
from longspec.engines import ENGINES, LLAMA_CPP, OURS, VLLM
from longspec.families import position_limit
from longspec.measure.engines.vllm import ENVIRONMENT, INSTALL, OF_METHOD, PLUGIN, check_on_cpu
from longspec.models.target_config import read_target_config
from longspec.workflow.serves import ServesPlan

SERVERS = (VLLM, LLAMA_CPP)  # engines with a server, the first choice first
# Rules that a call may run: serving a draft trains nothing.
MEASURES = ("evaluate", "serves_page", "check_serves", "serves")
AS_LLAMA = ("qwen2",)  # llama.cpp runs no draft beside these architectures; our export writes such a target as llama
POSITIONS = 2048  # of a text on a CPU, so that its cache fits
OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")  # in a draft's path, whatever "method" says
SERVER = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as for a measurement, but requests come side by side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("run", help="a run: a name of config/run/, or a file")
    parser.add_argument("--variant", help="default: the run's first")
    default = "default: vLLM where it is installed, else llama.cpp, if they load the draft"
    parser.add_argument("--engine", choices=SERVERS, help=default)


def run(options: argparse.Namespace) -> None:
    """Show what the engines keep of the draft, then become vLLM's server. For llama.cpp print the commands to type.

    Raises ValueError if there is no draft, or if the engine does not load it.
    """
    plan = plan_of(options.run)
    [name] = plan.runs
    variant = options.variant or plan.variants[name][0]
    if variant not in plan.variants[name]:
        raise ValueError(f"--variant: {variant!r} is unknown; choose one of {', '.join(plan.variants[name])}")
    draft = Path(f"results/{name}/{variant}/final_draft")
    if not (draft / "config.json").is_file():
        raise ValueError(f"{draft}: there is no draft yet; make it first: longspec train {options.run}")
    config, standings = read_json(draft / "config.json"), ServesPlan(plan).standings(name, variant)
    loading = [each for each in SERVERS if each in methods.settings_of(config["draft"]).SERVED]
    there = [each for each in loading if standings[each].section is not None]
    engine = ENGINES[options.engine or [*there, *loading, VLLM][0]]
    section = standings[engine.name].section
    tokens = (section or standings[OURS].section or {})["shapes"][0]
    if engine.name == LLAMA_CPP and LLAMA_CPP in loading:
        engine.check_beside(plan.first_recipe(name, variant).model.family)
        print("\n".join(llama_cpp_commands(draft, config, plan.first_recipe(name, variant), tokens)))
        return
    if section is None:
        raise ValueError(f"{engine.title} {standings[engine.name].why}")
    served = methods.served(config["draft"], engine.name)
    folder = draft / (served.layout or "")
    if not folder.is_dir():  # a draft from before this layout
        raise ValueError(f"{folder}: missing; make it by: longspec export {draft} --layout {folder.name}")
    if served.kind == "draft_model" and (found := [word for word in OTHER_METHODS if word in str(folder).lower()]):
        copied = f"longspec export {draft} --layout {folder.name} --out <another path>"
        raise ValueError(f"{folder}: vLLM takes a path with {found[0]} for another method; serve a copy by hand: {copied}")
    more = [*_on_this_machine(config["target_path"], folder), *options.more]
    code = snakemake("serves", "--config", f"run={options.run}", "--allowed-rules", *MEASURES)
    numbers = Path(f"results/{name}/serves.json")
    # Otherwise they may be of an earlier draft.
    if numbers.is_file() and (not code or numbers.stat().st_mtime >= (draft / "provenance.json").stat().st_mtime):
        show(read_json(numbers)["variants"][variant])
    if code:
        print("vLLM keeps clearly less than our loop, or it was not measured, as is said above; it is started all the same")
    speculative = {"method": served.kind, "model": str(folder), "num_speculative_tokens": tokens}
    speculative["draft_sample_method"] = "probabilistic"  # else drafts of sampled text are greedy, and fewer are kept
    words = [section.get("serve_python", engine.python), "-m", "vllm.entrypoints.openai.api_server"]
    plugin = Path(words[0]).absolute().parents[1].glob(f"lib/python*/*-packages/{PLUGIN.replace('-', '_')}-*.dist-info")
    if not torch.cuda.is_available() and not any(plugin):
        print(f"on a processor sampled text will not be the target's, only greedy text will: {PLUGIN} mends that; {INSTALL}")
    words += ["--model", config["target_path"], "--speculative-config", json.dumps(speculative), *more]
    print(join(words), flush=True)
    os.execve(words[0], words, SERVER | OF_METHOD.get(served.kind, {}) | os.environ)


def _on_this_machine(target: str, draft: Path) -> list[str]:
    """Return the options that a machine without a GPU needs: float32, which any processor has, and a cache that fits."""
    if torch.cuda.is_available():
        return []
    check_on_cpu(draft)
    positions = min(position_limit(read_target_config(target)), POSITIONS)
    return ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(positions)]


def show(measured: dict[str, Any]) -> None:
    """Print the share of rounds that kept each drafted token, of those that kept all before it. measured: serves.json."""
    for group in measured["groups"]:
        table = Table(title=f"{group['prompts']} held-out prompts of {', '.join(group['tasks'])}, greedy", title_justify="left")
        for column in ("", *map(str, range(1, measured["chain"] + 1)), "tokens a round", "rounds"):
            table.add_column(column, justify="right" if column else "left")
        for row in group["rows"]:
            shares = ("-" if found is None else f"{found['mean']:.2f}" for found in row["positions"])
            table.add_row(row["engine"], *shares, f"{row['tokens']['mean']:.2f}", str(row["rounds"]))
        Console().print(table)


def llama_cpp_commands(draft: Path, config: dict[str, Any], recipe: Any, tokens: int) -> list[str]:
    """Return the commands that write a draft and its target as GGUF files and start the user's llama.cpp with them.

    config: the draft's config.json. tokens: drafted tokens of a round. A target that came from a GGUF file is served from that
    file, unless llama.cpp runs no draft beside its architecture. Where llama.cpp shows a draft the whole text in spite of its
    sliding window, texts are kept within the window.
    """
    beside, source = draft.parent, str(config.get("target_source") or "")
    is_served = is_gguf(source) and Path(source).is_file() and config.get("target", {}).get("model_type") not in AS_LLAMA
    target = Path(source) if is_served else beside / "target.gguf"
    served = methods.settings_of(recipe.method.name).SERVED[LLAMA_CPP]
    window = None if served.windows else getattr(recipe.method, "sliding_window", None)
    methods.check_layout(recipe.method.name, recipe.method, served.layout, window)
    export = ["longspec", "export", str(draft), "--layout", "gguf", "--out", str(beside / "draft.gguf")]
    export += [] if str(target) == source else ["--target", str(target)]
    if is_gguf(source):  # its weights were made float32 here; rows of 32 numbers are quantized together
        sizes = [config["target"]["hidden_size"]]
        sizes += [config.get("settings", {}).get("intermediate_size") or config["target"]["intermediate_size"]]
        export += ["--dtype", "f16" if any(size % 32 for size in sizes) else "q8_0"]
    export += [] if window is None else ["--context", str(window)]
    serve = ["llama-server", "-m", str(target), "--spec-type", served.kind, "--spec-draft-model", str(beside / "draft.gguf")]
    serve += ["--spec-draft-n-max", str(tokens)]
    serve += [] if window is None else ["--ctx-size", str(window), "--parallel", "1"]
    return [join(export), join(serve)]
