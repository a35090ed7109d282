"""A run of two EAGLE-3 stages, the second one offline, on a file of a user's: the whole graph in two minutes of two cores."""

import random
from pathlib import Path

from longspec import jsonl
from tests.workflow.planning import Workflow, copy_to

RUN = "chaos"
INPUT = "inputs/sums.jsonl"
FILES = {
    f"config/run/{RUN}.yaml": """target: demo
method: eagle3
variants: [ttt]
evaluation: {tasks: {sums: {data: sums, context: [8, 40]}}}
stages: {base: , longcot: {recipe: {states: {source: offline}}}}
recipe:
  method: {layers: [0, 1, 2], vocabulary: 64}
  draft: {steps: 2}
  data: {name: sums, sequence_length: 64, overlong: split}
  optimizer: {lr: 1.0e-2}
  global_batch: 2
  steps: 12
runtime: {micro_batch: 1, save_every: 3, held_out_every: 6, held_out_rows: 2}
""",
    "config/model/demo.yaml": """# @package _global_
recipe:
  model: {family: qwen2, name: demo, source: build}
build:
  vocabulary: 270
  hidden: 32
  layers: 3
  heads: 4
  key_value_heads: 2
  intermediate: 64
  max_position: 1024
  mixture:
    - {dataset: sums, sequence_length: 64, rows: 4, steps: 20}
  lr: 3.0e-3
  seed: 0
""",
}


def records(count: int) -> list[dict[str, object]]:
    """Sums of two numbers, worked out in words."""
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"problem": f"{a} and {b}?", "qwq": f"take {a}, add {b}, and that is {a + b}."} for a, b in pairs]


def small_run(folder: Path, root: Path) -> Workflow:
    """A copy of the workflow with this run and its input."""
    copy = copy_to(folder, root)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    sums = f"  sums: {{source: {INPUT}, held_out: 0.1, shards: 2}}\n"
    copy.edit("config/workflow.yaml", r"^data:\n", f"data:\n{sums}")
    copy.edit("config/workflow.yaml", r"prompts: 40", "prompts: 6")
    copy.edit("config/workflow.yaml", r"new_tokens: 24", "new_tokens: 8")
    jsonl.write(folder / INPUT, records(300))
    return copy
