"""Memory and time of the target's forward by the size of its chunks (runtime.target_chunk), against whole rows.

    python benchmarks/glide_chunks.py

Two toy targets with the proportions of Qwen2.5-7B and of QwQ-32B at 1/14 and 1/20 of their width, one row of 4,096 tokens. A
chunk holds less of one layer at once, but the keys and values of all layers stay: that pays when a token's widest
activations are larger than its cache. Kept in benchmarks/results/glide_chunks_cpu.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.peak import best, measure
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import KEYS, VALUES

RESULTS = Path(__file__).parent / "results"
LENGTH, CHUNKS = 4096, (None, 512, 1024, 2048)
# Key/value heads, head width and layers as the models have them in proportion: cache and MLP of a token keep their ratio.
SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-7b / 14": {"hidden_size": 256, "intermediate_size": 1352, "num_hidden_layers": 28, "num_attention_heads": 7},
    "qwq-32b / 20": {"hidden_size": 256, "intermediate_size": 1384, "num_hidden_layers": 64, "num_attention_heads": 5},
}
HEADS = {
    "qwen2.5-7b / 14": {"num_key_value_heads": 1, "head_dim": 36},
    "qwq-32b / 20": {"num_key_value_heads": 1, "head_dim": 52},
}


def run_case(case: dict[str, Any]) -> None:
    """Measure one case and print it."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=1024, max_position_embeddings=LENGTH, **SHAPES[case["shape"]], **HEADS[case["shape"]])
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION)
    states = TargetStates(target.requires_grad_(False).eval(), chunk=case["chunk"])
    names = [f"{kind}{config.num_hidden_layers - 1}" for kind in (KEYS, VALUES)]

    def step(length: int = LENGTH) -> None:
        states(torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None], None, names)

    step(16)
    print(json.dumps(measure(step, torch.device("cpu"))))


def main() -> None:
    """All cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case)
        return
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for chunk in CHUNKS:
            case = {"shape": shape, "chunk": chunk}
            rows.append(case | best(__file__, case, 0))
            whole = next(row for row in rows if row["shape"] == shape)
            rows[-1] |= {"memory_ratio": rows[-1]["MiB"] / whole["MiB"], "time_ratio": rows[-1]["seconds"] / whole["seconds"]}
            print(json.dumps(rows[-1]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "glide_chunks_cpu.json").write_text(json.dumps({"length": LENGTH, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
