"""The demo's EAGLE-3 draft, measured by an engine and by our own decoding on the same prompts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.atomic_files import read_json
from longspec.measure import evaluate as verb

ROOT = Path(__file__).parents[2]
RUN = ROOT / "results/demo-eagle3/ttt"
DRAFT = RUN / "final_draft"
NEEDED = "results/demo-eagle3/ttt/final_draft/provenance.json"  # `make test-serve` makes it
CHAIN = 3
Line = dict[str, Any]


@dataclass
class Measured:
    """A target and its draft as files, and how an evaluation is called with them."""

    target: Path  # its manifest
    draft: Path
    recipe: Path
    prompts: int
    out: Path
    contexts: list[int] = field(default_factory=lambda: [64])  # tokens of the prompts of a task each

    def options(self, *more: str) -> Any:
        tasks = {f"of-{tokens}": {"data": "stdlib", "context": [tokens, tokens]} for tokens in self.contexts}
        settings = {"prompts": self.prompts, "new_tokens": 64, "temperatures": [0], "shapes": [CHAIN], "repeats": 1, "seed": 0}
        arguments = ["--settings", json.dumps(settings | {"tasks": tasks}), "--target", str(self.target)]
        arguments += ["--raw", "stdlib=data/raw/stdlib/manifest.json", "--drafter", "final", "--draft", str(self.draft)]
        (vocabulary,) = RUN.glob("draft_vocabulary_*.json")
        arguments += ["--recipe", str(self.recipe), "--vocabulary", str(vocabulary), "--out", str(self.out), *more]
        return verb.read_arguments(arguments)

    def lines(self, *more: str) -> list[Line]:
        """The lines of an evaluation."""
        verb.evaluate(self.options(*more))
        return list(jsonl.read(self.out))


def last_recipe() -> Path:
    return RUN / str(read_json(DRAFT / "config.json")["stage"]) / "recipe.yaml"


def acceptance(rounds: list[list[int]]) -> float:
    """Tokens a round, the target's own included."""
    return 1 + sum(map(sum, rounds)) / sum(map(len, rounds))


def is_as_ours(rounds: list[list[int]], ours: list[Line]) -> bool:
    """The acceptance within 2 %, and the rounds themselves the same in nine of ten texts.

    The sum alone is no bar for a fault that costs as often as it helps: a RoPE base left out moves it by 1 %.
    """
    own = [line["accepted"] for line in ours]
    equal = sum(found == known for found, known in zip(rounds, own, strict=True))
    print(f"acceptance {acceptance(rounds):.4f}, ours {acceptance(own):.4f}; the same rounds in {equal} of {len(own)} texts")
    return abs(acceptance(rounds) / acceptance(own) - 1) <= 0.02 and equal >= 0.9 * len(own)
