"""What waiting OpenMP threads cost a forward of few tokens: python benchmarks/spin.py

A target of random weights in SmolLM2-135M's shape decodes on two threads, in a process for each way in which they wait for
their next piece of work: asleep at once (`passive`), spinning for some turns first (`GOMP_SPINCOUNT`; 100,000 turns are a
millisecond), or as GNU's runtime does by itself (`default`). Alone, and beside a process that keeps a core busy. Milliseconds
of a forward of one token and of eleven, the median of 12. The package takes 10,000 turns (longspec/__init__.py).
"""

import json
import os
import subprocess
import sys
import time
from statistics import median

WAYS = {
    "passive": {"OMP_WAIT_POLICY": "passive"},
    **{f"{turns} turns": {"GOMP_SPINCOUNT": str(turns)} for turns in (1000, 3000, 10_000, 30_000)},
    "default": {},
}
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
CONTEXT, TOKENS, REPEATS = 200, (1, 11), 12
BUSY = "while True: pass"


def forwards() -> dict[str, float]:
    """In a process of one way: milliseconds by number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).eval()
    found = {}
    with torch.inference_mode():
        for count in TOKENS:
            cache, times = DynamicCache(config=model.config), []
            model(torch.zeros(1, CONTEXT, dtype=torch.long), past_key_values=cache)
            for _ in range(REPEATS):
                began = time.perf_counter()
                model(torch.zeros(1, count, dtype=torch.long), past_key_values=cache)
                times.append(1e3 * (time.perf_counter() - began))
                cache.crop(-count)
            found[str(count)] = round(median(times), 1)
    return found


def run(way: str) -> dict[str, float]:
    """One way in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, __file__, "forwards"]
    environment = kept | WAYS[way] | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all ways alone and beside a busy process, and write."""
    if sys.argv[1:] == ["forwards"]:
        print(json.dumps(forwards()))
        return
    import machine  # its package would set the variables in the processes that are measured

    description = machine.describe(("torch", "transformers"))
    found = {"alone": {way: run(way) for way in WAYS}}
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        found["beside a busy process"] = {way: run(way) for way in WAYS}
        busy.kill()
    machine.write("spin", {"machine": description, "milliseconds": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
