"""What a training step loses to memory that goes to the system and comes back: python benchmarks/heap.py

EAGLE-3's step at SmolLM2-135M's shape, as `make smollm2` trains it: a row of 1,536 tokens, bfloat16, a draft vocabulary of
8,192, a window of 512; random states and labels of 64 tokens. In turns, each time in a process of its own: as GNU's allocator
does by itself, and as the package has it told (longspec/__init__.py). Processor seconds of a step on one thread, the median of
8, the least of each way's three processes; and the most memory that a process held.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
WAYS = ("by itself", "as told")
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LENGTH, DOCUMENT, PROPOSED, LIKELIEST, REPEATS, PROCESSES = 1536, 250, 8192, 64, 8, 3


def step() -> dict[str, float]:
    """In a process of one way: seconds of a step, and MiB."""
    import torch

    from benchmarks.eagle3_step import LAYERS, build
    from longspec.methods.eagle3.settings import Settings
    from longspec.states.tensors import BEST_TOKEN, COS, EMBEDDED, HIDDEN, NEXT_LOG_PROB, SIN, TOP_LOG_PROBS, TOP_TOKENS

    torch.set_num_threads(1)
    ids = tuple(range(0, SHAPE["vocab_size"], SHAPE["vocab_size"] // PROPOSED))
    settings = Settings(layers=LAYERS, vocabulary=PROPOSED, ids=ids, target_vocabulary=SHAPE["vocab_size"], sliding_window=512)
    trainer = build(settings, torch.device("cpu"), torch.bfloat16, SHAPE)
    embedded_BSH = trainer.states.target.model.embed_tokens.weight[None, :LENGTH]
    places_BS = torch.arange(LENGTH)[None]
    position_ids_BS, document_ids_BS = places_BS % DOCUMENT, places_BS // DOCUMENT
    cos_BSD, sin_BSD = trainer.states.target.model.rotary_emb(embedded_BSH, position_ids_BS)
    tokens_BSk = torch.tensor(ids)[torch.rand(LENGTH, PROPOSED).topk(LIKELIEST).indices][None].int()
    log_probs_BSk = torch.randn(1, LENGTH, LIKELIEST).log_softmax(-1).half()
    found = {name: torch.randn_like(embedded_BSH) for name in (EMBEDDED, *(f"{HIDDEN}{layer}" for layer in LAYERS))}
    found |= {COS: cos_BSD, SIN: sin_BSD, TOP_TOKENS: tokens_BSk, TOP_LOG_PROBS: log_probs_BSk}
    found |= {BEST_TOKEN: tokens_BSk[..., 0], NEXT_LOG_PROB: log_probs_BSk[..., 0]}
    trainer.states.forward = lambda *_: found
    ids_BS = torch.randint(0, SHAPE["vocab_size"], (1, LENGTH))
    seconds = []
    for _ in range(2 + REPEATS):  # the first two make what the others reuse
        began = time.process_time()
        trainer(ids_BS, ids_BS, position_ids_BS, document_ids_BS).loss.backward()
        seconds.append(time.process_time() - began)
    return {"seconds": median(seconds[2:]), "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run(way: str) -> dict[str, float]:
    """One way in a process of its own. The package, which main has loaded, has set the variables in this one."""
    environment = {name: value for name, value in os.environ.items() if way == "as told" or name not in VARIABLES}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, __file__, "step"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure both ways in turns, and write."""
    if sys.argv[1:] == ["step"]:
        print(json.dumps(step()))
        return
    from benchmarks import machine

    description = machine.describe(("torch",))
    turns = [{way: run(way) for way in WAYS} for _ in range(PROCESSES)]
    found = {way: {name: round(min(turn[way][name] for turn in turns), 3) for name in ("seconds", "MiB")} for way in WAYS}
    ratio = round(found["as told"]["seconds"] / found["by itself"]["seconds"], 3)
    machine.write("heap", {"machine": description, **found, "seconds as told over by itself": ratio})
    print(json.dumps(found, indent=1), ratio)


if __name__ == "__main__":
    main()
