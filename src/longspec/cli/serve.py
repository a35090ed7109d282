"""Serve a run's target and draft by vLLM, and hold ten held-out prompts against the run's own evaluation.

For llama.cpp it prints the commands to type. Further options of vLLM stand behind --, such as: longspec serve mine --
--tensor-parallel-size 8
"""

import argparse
import json
import os
import re
import shlex
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from longspec import jsonl, methods
from longspec.answers.server import PAST_PROXIES, started
from longspec.atomic_files import read_json_object
from longspec.cli.engine_choice import choose, llama_cpp_commands
from longspec.cli.runs import plan_of
from longspec.engines import ENGINES, LLAMA_CPP
from longspec.families import position_limit
from longspec.measure.engines.vllm import BY_PLACE, ENVIRONMENT, OF_METHOD, check_on_cpu
from longspec.measure.lines import key_of, key_text
from longspec.measure.prompts import all_prompts
from longspec.measure.tasks import ROOM, Prompt, Setting, Settings, check_interpreter, parse
from longspec.models.target_config import read_target_config
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.plan import Plan

PROMPTS = 10
CHAIN = 3  # drafted tokens of a round, where the evaluation measured no greedy chain
LOOK = 5.0  # seconds between two looks whether the server answers
LESS = 0.9  # of our tokens a round: below, something is set up otherwise than it was trained
ON_CPU = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")  # of ENVIRONMENT
ROUNDS, KEPT = "vllm:spec_decode_num_drafts_total", f"{BY_PLACE}_total"
Counts = list[int]  # rounds, and in how many of them the first, second, ... drafted token was kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("run", help="a run: a name of config/run/, or a file")
    parser.add_argument("--variant", help="default: the run's first")
    parser.add_argument(
        "--engine", choices=list(ENGINES), help="default: vLLM where it is installed, else llama.cpp, if they load the draft"
    )
    parser.add_argument("--port", type=int, help="default: one that is free")
    parser.add_argument("--python", help="of vLLM's environment; default: evaluation.serve_python, .venv-serve/vllm/bin/python")
    parser.add_argument("--minutes", type=float, default=30, help="in which vLLM must begin to answer; default: 30")
    parser.add_argument("--check", action="store_true", help="end after the ten prompts")


def run(options: argparse.Namespace) -> int:
    """Start vLLM, ask it, show the acceptance, and serve until Ctrl-C; 1 where less is accepted than was measured.

    For llama.cpp it prints what to type. Raises ValueError for a draft that is not there, or that the engine does not load.
    """
    plan = plan_of(options.run)
    [name] = plan.runs
    variant = options.variant or plan.variants[name][0]
    if variant not in plan.variants[name]:
        raise ValueError(f"--variant: {variant!r} is unknown; choose one of {', '.join(plan.variants[name])}")
    draft = Path(f"results/{name}/{variant}/final_draft")
    if not (draft / "config.json").is_file():
        raise ValueError(f"{draft}: there is no draft yet; make it first: longspec train {options.run}")
    config = read_json_object(draft / "config.json")
    section = parse(plan.evaluation_of[name].section)
    pythons = {each.name: options.python or section.interpreter(each) for each in ENGINES.values()}
    engine = choose(config["draft"], options.engine, pythons, options.run, draft)
    greedy = (each for each in section.settings if each.temperature == 0 and isinstance(each.shape, int))
    setting = next(greedy, None)  # the first greedy chain that the evaluation measured
    recipe = plan.first_recipe(name, variant)
    tokens = (methods.longest_chain(recipe) or CHAIN) if setting is None else setting.depth
    methods.check_chain(recipe, tokens)
    if engine.name == LLAMA_CPP:
        if options.check or options.more:
            given = "--check" if options.check else "--"
            raise ValueError(f"--engine {LLAMA_CPP}: {given}: is for vLLM, which is started here; leave it out")
        print("\n".join(llama_cpp_commands(draft, config, recipe, tokens)))
        return 0
    served = methods.served(config["draft"], engine.name)
    folder = draft / (served.layout or "")
    if not folder.is_dir():  # of a draft from before this layout
        raise ValueError(f"{folder}: missing; make it by: longspec export {draft} --layout {folder.name}")
    python = options.python or section.interpreter(engine)
    check_interpreter(python, engine)
    target = Path(config["target_path"])
    prompts = first_prompts(plan, name, section, target)
    more = [*_on_this_machine(target, folder, prompts), *options.more]
    speculative = json.dumps({"method": served.kind, "model": str(folder), "num_speculative_tokens": tokens})
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}"]
    command = shlex.join([*words, "--speculative-config", speculative, *more])
    for variable, value in OF_METHOD.get(served.kind, {}).items():
        os.environ.setdefault(variable, value)
    log = Path(f"logs/serve/{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with started(command, target, options.minutes, log, port=options.port, keys=("--python", "--minutes")) as address:
        is_less = show(ask(address, prompts, tokens), measured(name, variant, prompts, setting), prompts)
        if options.check:
            return int(is_less)
        print(f"{address}: serving until Ctrl-C; what vLLM prints: {log}", flush=True)
        try:
            while True:
                time.sleep(LOOK)
                _read(f"{address}/models")  # a server that has ended is an error
        except KeyboardInterrupt:
            print("\nstopped by you")
    return 0


def _on_this_machine(target: Path, draft: Path, prompts: Iterable[Prompt]) -> list[str]:
    """Return the options that a machine without a GPU needs: float32, which any processor has, and a cache that fits."""
    if torch.cuda.is_available():
        return []
    check_on_cpu(draft)
    for name in ON_CPU:
        os.environ.setdefault(name, ENVIRONMENT[name])
    longest = max(len(prompt.ids) + prompt.new_tokens for prompt in prompts) + ROOM
    positions = min(position_limit(read_target_config(str(target))), max(longest, 2048))
    return ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(positions)]


def first_prompts(plan: Plan, run: str, section: Settings, target: Path) -> list[Prompt]:
    """Return ten prompts of the run's evaluation, the first ones of each task in turn."""
    raw = {name: Path(path) for name, path in (each.split("=", 1) for each in AnswersPlan(plan).evaluation_options(run))}
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    positions = position_limit(read_target_config(str(target)))
    found = all_prompts(raw, section, tokenizer, positions)
    return sorted(found, key=lambda prompt: prompt.number)[:PROMPTS]


def ask(address: str, prompts: Iterable[Prompt], tokens: int) -> Counts:
    """Have the server complete each prompt greedily, one after the other, and return what its counters say of it."""
    model = json.loads(_read(f"{address}/models"))["data"][0]["id"]
    metrics = address.removesuffix("/v1") + "/metrics"
    before = counted(_read(metrics), tokens)
    for prompt in prompts:
        body = {"model": model, "prompt": prompt.ids, "max_tokens": prompt.new_tokens + 1, "temperature": 0}
        _read(f"{address}/completions", body)
    after = counted(_read(metrics), tokens)
    return [b - a for a, b in zip(before, after, strict=True)]


def counted(metrics: str, tokens: int) -> Counts:
    """Read vLLM's counters of a text in Prometheus' form; a counter that does not stand there is 0."""
    patterns = [rf"{ROUNDS}(?:\{{[^}}]*\}})?"]
    patterns += [rf'{KEPT}\{{(?:[^}}]*,)?position="{place}"(?:,[^}}]*)?\}}' for place in range(tokens)]
    found = (re.findall(rf"^{pattern} ([0-9.eE+]+)$", metrics, re.MULTILINE) for pattern in patterns)
    return [int(sum(map(float, numbers))) for numbers in found]


def measured(run: str, variant: str, prompts: Iterable[Prompt], setting: Setting | None) -> Counts | None:
    """Return what our own evaluation of the published stage says of these prompts; None where it did not measure them all."""
    report = Path(f"results/{run}/report.json")
    if setting is None or not report.is_file():
        return None
    path = Path(f"results/{run}/{variant}/evaluation/{read_json_object(report)['final'][variant]['stage']}.jsonl")
    lines = {key_text(line): line for line in jsonl.read(path)} if path.is_file() else {}
    found = [lines.get(key_text(key_of(prompt, setting))) for prompt in prompts]
    if None in found:
        return None
    accepted = [count for line in found if line is not None for count in line["accepted"]]
    return [sum(count >= place for count in accepted) for place in range(setting.depth + 1)]


def show(served: Counts, ours: Counts | None, prompts: Iterable[Prompt]) -> bool:
    """Print the share of rounds that kept each drafted token, in vLLM and in ours; tell whether vLLM keeps clearly less."""
    tasks = [prompt.task for prompt in prompts]
    counts = ", ".join(f"{tasks.count(task)} of {task}" for task in dict.fromkeys(tasks))
    print(f"rounds that kept each drafted token: {len(tasks)} held-out prompts ({counts}), greedy")
    table, a_round = Table(), []
    for column in ("", *map(str, range(1, len(served))), "tokens a round", "rounds"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in {"vLLM": served, "our evaluation": ours}.items():
        if each is not None:
            rounds, *kept = each
            a_round.append(1 + sum(kept) / rounds if rounds else 0.0)  # with the target's own token
            shares = (f"{count / rounds if rounds else 0:.2f}" for count in kept)
            table.add_row(name, *shares, f"{a_round[-1]:.2f}", str(rounds))
    Console().print(table)
    if ours is None:
        print("our evaluation did not measure these prompts greedily by chains, so there is nothing to compare with")
    is_less = ours is not None and a_round[0] < LESS * a_round[1]
    if is_less:
        print("vLLM keeps clearly less than our evaluation: docs/serve.md, 'When less is accepted than in training'")
    return is_less


def _read(address: str, body: Mapping[str, Any] | None = None) -> str:
    """Return what a server of this machine answers, past any proxy."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
    with PAST_PROXIES.open(request, timeout=3600) as answer:
        return str(answer.read().decode())
