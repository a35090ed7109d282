"""A whole run's files with realistic figures, made from a seed: what the report reads, nothing more."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl
from longspec.atomic_files import write_json, write_text
from longspec.config import compose_stage, to_yaml
from longspec.draft_vocabulary import DraftVocabulary

STAGES = ("base", "long", "longcot")
SETTINGS: dict[str, Any] = {"prompts": 48, "new_tokens": 64, "temperatures": [0], "shapes": [4], "repeats": 1, "seed": 0}
SETTINGS["tasks"] = {
    "short": {"data": "stdlib", "context": [64, 448]},
    "long": {"data": "stdlib-long", "context": [1024, 4096]},
    "cot": {"data": "puzzles", "context": [64, 1024]},
}
# Chance that the next drafted token is accepted, given that all before it were: by drafter and task.
SKILL = {
    "untrained": {"short": 0.04, "long": 0.04, "cot": 0.05},
    "lookup": {"short": 0.22, "long": 0.27, "cot": 0.3},
    "base": {"short": 0.4, "long": 0.36, "cot": 0.38},
    "long": {"short": 0.41, "long": 0.43, "cot": 0.4},
    "longcot": {"short": 0.405, "long": 0.43, "cot": 0.5},
}
GATES = {"forgetting": 0.3, "context": 0.3}
MODEL = {"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 1024}


def positions(accepted: list[int], depth: int) -> list[list[int]]:
    """How often each drafted token was kept, and how often it could have been."""
    return [
        [sum(kept >= place for kept in accepted), sum(kept >= place - 1 for kept in accepted)] for place in range(1, depth + 1)
    ]


def line(drafter: str, task: str, prompt: int, accepted: list[int], depth: int, **more: Any) -> dict[str, Any]:
    """Make a line of an evaluation; more: fields in place of its own."""
    new, rounds = sum(accepted) + len(accepted), len(accepted)
    made = {"task": task, "drafter": drafter, "prompt": prompt, "record": prompt, "prompt_hash": f"{task} {prompt}"}
    made |= {"temperature": 0.0, "shape": depth, "context_tokens": 100, "accepted": accepted, "rounds": rounds}
    made |= {"new_tokens": new, "acceptance_length": new / max(1, rounds), "positions": positions(accepted, depth)}
    made |= {"tokens_compared": new, "mismatches": 0, "near_ties": 0, "margin": None, "margin_allowed": None}
    seconds = {"seconds_plain": 1.0, "seconds_speculative": 1.0, "seconds_draft": 0.5, "seconds_target": 0.4}
    return made | seconds | more


def evaluation_rows(drafter: str, settings: dict[str, Any], seed: int, shift: float = 0.0) -> list[dict[str, Any]]:
    """One line per prompt; hardness and context of a prompt are the same for every drafter."""
    rows = []
    rng = np.random.default_rng([seed, sum(map(ord, drafter))])
    depth = settings["shapes"][0]
    for number, (task, chosen) in enumerate(settings["tasks"].items()):
        prompts = np.random.default_rng(number)
        for prompt in range(settings["prompts"]):
            context, hard = int(prompts.integers(*chosen["context"])), prompts.normal(0, 0.05)
            chance = float(np.clip(SKILL[drafter][task] + shift * (drafter in STAGES) + hard, 0.01, 0.95))
            accepted: list[int] = []
            while sum(accepted) + len(accepted) < settings["new_tokens"]:
                accepted.append(min(int(rng.geometric(1 - chance)) - 1, depth))
            target, draft = 0.0021 * len(accepted), (0.00002 if drafter == "lookup" else 0.0033) * len(accepted)
            plain = 0.0019 * (sum(accepted) + len(accepted)) * rng.normal(1, 0.05)
            seconds = {"seconds_draft": draft, "seconds_target": target, "seconds_speculative": (target + draft) * 1.12}
            more = seconds | {"seconds_plain": plain} | ({} if prompt else {"sample": sample(accepted)})
            rows.append(line(drafter, task, prompt, accepted, depth, record=prompt // 2, context_tokens=context, **more))
    return rows


def sample(accepted: list[int]) -> dict[str, Any]:
    """A text of which so many drafted tokens were kept in each round."""
    tokens: list[dict[str, Any]] = [{"text": "The", "depth": 0}]
    for kept in accepted:
        tokens += [{"text": f" draft{depth}", "depth": depth} for depth in range(1, kept + 1)]
        tokens.append({"text": " own\n", "depth": 0})
    return {"before": "Once upon a time. ", "tokens": tokens}


def metric_rows(steps: int, start: float, end: float, floor: float, seed: int) -> list[dict[str, Any]]:
    """A loss that falls from `start` to `end` nats, beside the target's own."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        noise = rng.normal(0, 0.08)
        loss = end + (start - end) * float(np.exp(-step / (steps / 6))) + noise + rng.normal(0, 0.03)
        rows.append(
            {"step": step, "loss": loss, "llm_loss": floor + noise, "lr": 1e-3, "grad_norm": 0.7, "tokens": 8192}
            | {"labels": 8100, "tokens_seen": step * 8192, "seconds": 0.6, "skipped": 0}
        )
    return rows


@cache
def recipe_text(run: str, variant: str, stage: str) -> str:
    """A stage's frozen recipe."""
    return to_yaml(compose_stage(run, variant, stage).recipe)


def write_variant(folder: Path, variant: str, settings: dict[str, Any], shift: float = 0.0) -> None:
    """Stages, evaluations and provenance of one variant."""
    losses = {"base": (200, 6.9, 3.1, 2.35), "long": (60, 3.0, 2.75, 2.3), "longcot": (100, 2.6, 1.7, 1.2)}
    for number, stage in enumerate(STAGES):
        write_text(folder / stage / "recipe.yaml", recipe_text("demo", variant, stage))
        jsonl.write(folder / stage / "metrics.jsonl", metric_rows(*losses[stage], seed=number))
    for drafter in ("untrained", "lookup", *STAGES):
        jsonl.write(folder / "evaluation" / f"{drafter}.jsonl", evaluation_rows(drafter, settings, 1, shift))
    provenance: dict[str, Any] = {"git_commit": "0f" * 20, "python": "3.11.9", "order": STAGES}
    provenance["stages"] = {stage: {"world_size": 1, "training_seconds": 60.0} for stage in STAGES}
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"}
    write_json(folder / "final_draft" / "provenance.json", provenance | {"versions": versions})


def make_eagle3(folder: Path, coverage: dict[str, float]) -> Path:
    """Turn a variant's stages into EAGLE-3's, each step of which counts 7 labels without a loss; its draft vocabulary."""
    for stage in STAGES:
        write_text(folder / stage / "recipe.yaml", recipe_text("demo-eagle3", "ttt", stage))
        path = folder / stage / "metrics.jsonl"
        jsonl.write(path, [row | {"outside_vocabulary": 7} for row in jsonl.read(path)])
    path = folder / "draft_vocabulary_4.json"
    DraftVocabulary((1, 2, 5, 6), 1024, "t", coverage).write(path)
    return path


def write_data(folder: Path) -> tuple[list[Path], list[Path]]:
    """Manifests of raw and packed datasets."""
    raw, packed = [], []
    kinds = {
        "stdlib": ("base", 128, "split", 1640),
        "stdlib-long": ("long-nomask", 4096, "split", 190),
        "puzzles": ("longcot", 2048, "split", 4000),
    }
    for name, (collation, length, overlong, read) in kinds.items():
        records = {"train": read - read // 20 - 3, "held_out": read // 20, "rejected": 1, "filtered": 2}
        records |= {"read": read, "made": 0}
        raw.append(folder / "raw" / name / "manifest.json")
        write_json(raw[-1], {"name": name, "settings": {}, "files": {}, "records": records})
        rows = 3_900_000 // length
        packed.append(folder / "packed" / "demo" / f"{name}-{collation}-{length}-{overlong}" / "manifest.json")
        content = {"dataset": name, "rows": rows, "sequence_length": length, "collation": collation, "overlong": overlong}
        content |= {"tokens": 3_890_000, "documents": records["train"], "cut_tokens": 0, "padding_share": 0.0031, "skipped": 3}
        write_json(packed[-1], content | {"labels": 3_880_000, "files": {}, "tokenizer": "", "tokens_manifests": []})
    return raw, packed


def write_target(folder: Path) -> None:
    """A target's manifest and its config.json."""
    content = {"num_attention_heads": 4, "num_key_value_heads": 2, **MODEL}
    write_json(folder / "target" / "config.json", content)
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "source": "build", "files": {}})


def write_run(folder: Path, variants: dict[str, float], settings: dict[str, Any] = SETTINGS, model: str = "demo") -> list[str]:
    """All files of a run; returns the report's command line. `variants`: name -> shift of the drafts' skill."""
    raw, packed = write_data(folder / "data")
    write_target(folder / "models" / model)
    options: list[str] = []
    for name, shift in variants.items():
        known = name if name in ("base", "sinkpi-slicing") else "base"
        write_variant(folder / "results" / name, known, settings, shift)
        options += ["--variant", f"{name}={folder / 'results' / name}"]
    options += ["--run", "demo", "--settings", json.dumps(settings), "--gates", json.dumps(GATES)]
    options += ["--model-dir", str(folder / "models" / model)]
    options += ["--raw", *map(str, raw), "--packed", *map(str, packed)]
    return [*options, "--out", str(folder / "report.html")]
