"""Measure a drafter on prompts: acceptance, speed, losslessness."""

import argparse
import json
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from longspec import jsonl, methods, shown
from longspec.atomic_files import checked_folder, describe_files, files_below, read_json, sha256_file, sha256_text
from longspec.config import Recipe, load
from longspec.config.names import BASELINES, LOOKUP, UNTRAINED, WITH_LOOKUP
from longspec.decode.drafters import Drafter
from longspec.decode.generate import load_drafter
from longspec.decode.lookup import LookupDrafter, WithLookup
from longspec.decode.texts import ends_of_text
from longspec.distributed import ALONE, Ranks, end_at_once, launched_ranks, log, processor_name
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_hash
from longspec.engines import ENGINES, OURS
from longspec.families import position_limit
from longspec.journal import Identity, Journal, read_finished, unfinished, write_finished
from longspec.measure import engine_files, served, tasks
from longspec.measure.lines import FAULT, Line, Work, WrongTextError, key_of, key_text, summarize
from longspec.measure.measurer import Measurer
from longspec.measure.prompts import all_prompts
from longspec.measure.served import PLAIN, RefusedError, ServedMeasurer
from longspec.methods import decoded_vocabulary
from longspec.models.attention import flash
from longspec.models.target import join_ranks, place_target, resolve_dtype, within_memory
from longspec.process_group import own_device
from longspec.shown import named_path
from longspec.states.forward import TargetStates


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options; --engine and --serve-python are merged into `settings`."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure evaluate", description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON of workflow.yaml: evaluation")
    parser.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    parser.add_argument(
        "--raw", nargs="*", default=[], type=named_path, metavar="NAME=MANIFEST", help="raw manifests of the tasks' data"
    )
    parser.add_argument("--drafter", required=True, help=f"{UNTRAINED} | {LOOKUP} | {WITH_LOOKUP} | a stage's name")
    parser.add_argument("--draft", type=Path, help="the draft's folder")
    parser.add_argument("--recipe", type=Path, required=True, help="the stage's recipe.yaml (its draft settings and seed)")
    parser.add_argument("--vocabulary", type=Path, help="tokens that the draft can propose, or is to; default: all")
    more = argparse.SUPPRESS  # an option not given stays as in the settings
    parser.add_argument("--engine", choices=(OURS, *ENGINES), default=more, help="what decodes; default: the settings'")
    python = "interpreter of the engine's environment; default: the settings' `serve_python`, .venv-serve/<engine>/bin/python"
    parser.add_argument("--serve-python", metavar="PATH", default=more, help=python)
    given = "file or folder that the engine loads in place of the one that is written for it: {}"
    parser.add_argument("--served-target", type=Path, help=given.format("the target, such as the GGUF file it came from"))
    parser.add_argument("--served-draft", type=Path, help=given.format("the draft, as `longspec export` writes it"))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a prompt, temperature and shape")
    fault = "where another engine refuses, or its text is wrong: write why, as the only line, and end well"
    parser.add_argument("--keep-fault", action="store_true", help=fault)
    options = parser.parse_args(arguments)
    if options.drafter not in BASELINES and options.draft is None:
        parser.error(f"--drafter {options.drafter} needs --draft, the draft's folder")
    options.settings |= {name: value for name, value in vars(options).items() if name in ("engine", "serve_python")}
    return options


def read_vocabulary(options: argparse.Namespace, target: Any, recipe: Any) -> DraftVocabulary | None:
    """Return the tokens that the drafter proposes; None: all. Raises ValueError if they do not fit recipe or target."""
    vocabulary = None if options.drafter == LOOKUP else decoded_vocabulary(recipe, options.vocabulary)
    if vocabulary is not None:
        tokenizer = tokenizer_hash(read_json(options.target)["files"])
        vocabulary.check_tokens(options.vocabulary, target.config.vocab_size, options.target, tokenizer)
    return vocabulary


def make_drafter(
    options: argparse.Namespace, target: Any, recipe: Any, vocabulary: DraftVocabulary | None, copied: int | None
) -> Drafter:
    """Make the drafter to measure: prompt lookup, a draft with trained weights or fresh ones from the recipe's seed, or both.

    copied: most tokens of prompt lookup next to a draft. Raises ValueError if the drafter needs it and it is None.
    """
    if options.drafter == LOOKUP:
        return LookupDrafter()
    if options.drafter == WITH_LOOKUP:
        if copied is None:
            raise ValueError(f"--drafter {WITH_LOOKUP}: evaluation.with_lookup: null: give a number of tokens, such as 8")
        # The settings stored with the draft: those of whichever stage is published.
        is_own = methods.has_own_vocabulary(recipe.method.name)
        return WithLookup(load_drafter(target, options.draft, None if is_own else options.vocabulary), copied)
    method, settings = engine_files.settings_of_drafter(options, recipe, vocabulary)
    torch.manual_seed(recipe.seed)
    layer = method.trainer(TargetStates(target), settings, None).draft_model.to(target.device)
    if options.drafter != UNTRAINED:
        method.load(layer, options.draft, target.config, settings)
    return methods.drafter(method.name, target, layer.eval(), settings, vocabulary)


def identity_of(
    options: argparse.Namespace, target: Any, section: tasks.Settings, vocabulary: DraftVocabulary | None
) -> Identity:
    """Return everything that decides a line of the results, apart from its prompt and setting."""
    code = sorted(Path(__file__).parents[1].rglob("*.py"))  # the commit of this package is not known everywhere
    device = target.device
    return {
        "drafter": options.drafter,
        "draft": sha256_file(options.draft / "model.safetensors") if options.draft else None,
        "target": sha256_file(options.target),
        "recipe": None if options.drafter == LOOKUP else sha256_file(options.recipe),
        "vocabulary": None if vocabulary is None else vocabulary.hash,
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash-attn": not flash.unusable(),
        "code": sha256_text("".join(path.read_text(encoding="utf-8") for path in code)),
        "repeats": section.repeats,
        "seed": section.seed,
        "copied tokens": section.with_lookup,
    }


def measure_all(
    journal: Journal, measurer: Measurer | ServedMeasurer, all_work: Work, measured: Iterable[Line] = ()
) -> list[Line]:
    """Return a line for each prompt and setting, in order: from the journal, or measured now.

    measured: lines of a finished evaluation. They are reused if it had other prompts or settings than `all_work`, such as one
    task less. If it had the same ones, all are measured again.
    """
    done = {key_text(line): line for line in journal.lines or [] if PLAIN not in line}
    before = {key_text(line): line for line in measured}
    if before.keys() == all_work.keys():
        before = {}
        if not done:
            log("asked again for the same lines: they are measured anew")
    for key in (before.keys() & all_work.keys()) - done.keys():
        done[key] = before[key]
        journal.append(before[key])
    left_out = len(done.keys() - all_work.keys())
    if left_out:
        log(f"{journal.path}: {left_out} lines of other prompts or settings are left out")
    done |= measurer.lines({key: item for key, item in all_work.items() if key not in done}, journal)
    # Nothing is computed from the reference answer and the record's number, which may have changed: take the current ones.
    return [done[key] | {"reference": prompt.reference, "record": prompt.record} for key, (prompt, _) in all_work.items()]


def given_files(options: argparse.Namespace, section: tasks.Settings) -> dict[str, Any]:
    """Return name and hashes of the files that the engine loads instead of files written for it.

    Raises ValueError if one does not exist, or if our own engine decodes.
    """
    found = {}
    for option, path in (("--served-target", options.served_target), ("--served-draft", options.served_draft)):
        if path is None:
            continue
        if section.served_by is None:
            raise ValueError(f"{option}: {path}: is for other engines; evaluation.engine is {OURS}")
        if not path.exists():
            raise ValueError(f"{option}: {path}: no such file or folder; correct the path")
        folder, names = (path, files_below(path)) if path.is_dir() else (path.parent, [path.name])
        found[option] = describe_files(folder, names)
    return found


def evaluate(options: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Measure one drafter on all tasks and write its lines.

    ranks: hold the target together; each decodes everything, rank 0 writes. Raises ValueError if greedy text differs from the
    target's own.
    """
    path, recipe = checked_folder(options.target), load(options.recipe, Recipe)
    section = tasks.parse(options.settings)
    if options.drafter == UNTRAINED:  # nobody decodes with it: only its acceptance is shown, so one repeat is enough
        section = replace(section, repeats=1)
    dtype = resolve_dtype(recipe.precision)
    device = own_device(ranks)
    engine = given_files(options, section)
    if section.served_by is not None:
        if ranks.world_size > 1:
            started = f"was started on {ranks.world_size} ranks; start one, without torchrun"
            raise ValueError(f"evaluation.engine: {section.engine}: {started}")
        engine["engine"] = served.versions(section.served_by, section.interpreter(section.served_by))
        target: Any = engine_files.served_target(path, dtype, device)
    else:
        join_ranks(ranks)
        engine |= {"ranks": ranks.world_size} if ranks.world_size > 1 else {}
        target = place_target(path, dtype, ranks)
    vocabulary = read_vocabulary(options, target, recipe)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompts = all_prompts(dict(options.raw), section, tokenizer, position_limit(target.config))
    context = max(len(prompt.ids) + prompt.new_tokens for prompt in prompts) + max(each.depth for each in section.settings)
    eos, of_all = ends_of_text(target, tokenizer), (tokenizer, section.repeats, section.seed)
    with ExitStack() as opened:
        measurer: Measurer | ServedMeasurer
        if section.served_by is None:
            drafter = make_drafter(options, target, recipe, vocabulary, section.with_lookup)
            measurer = Measurer(target, drafter, eos, *of_all)
        else:
            if options.drafter != LOOKUP:
                methods.check_chain(recipe, max(each.depth for each in section.settings))
            loaded = engine_files.loaded(section.served_by, options, target, recipe, vocabulary, context)
            python, files = section.interpreter(section.served_by), opened.enter_context(loaded)
            measurer = ServedMeasurer(section.served_by, python, target, files, sorted(eos), *of_all)
        by = engine.get("engine", device)
        log(f"{options.drafter}: {len(prompts)} prompts, {len(section.settings)} settings, {dtype}, {by}", ranks)
        work = {key_text(key_of(*item)): item for item in product(prompts, section.settings)}
        identity = engine | identity_of(options, target, section, vocabulary)
        with Journal(unfinished(options.out), identity, ranks) as journal:
            lines = measure_all(journal, measurer, work, read_finished(options.out, identity, ranks))
            if ranks.is_main:
                jsonl.write(options.out, ({"drafter": options.drafter, **line} for line in lines))
                write_finished(options.out, identity, lines)
            journal.remove()
    log("\n".join(map(json.dumps, summarize(lines))), ranks)


def evaluate_or_keep_fault(options: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Run the evaluation; with --keep-fault, an engine's own fault, which would come again, is written as the result."""
    try:
        evaluate(options, ranks)
    except (RefusedError, WrongTextError) as fault:
        if not options.keep_fault:
            raise
        log(shown.error(fault))
        jsonl.write(options.out, [{FAULT: str(fault), "failed": isinstance(fault, WrongTextError)}])


def main(arguments: list[str]) -> None:
    """Run the evaluation, or one rank of it; report a user's mistake in one line."""
    ranks = launched_ranks()
    if ranks.world_size == 1:
        # On SIGTERM, stop the engine and remove what was written for it, as after an error.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with shown.ending_for_mistakes(), within_memory("evaluate"):
        evaluate_or_keep_fault(read_arguments(arguments), ranks)
    if ranks.world_size > 1:
        end_at_once(0)
