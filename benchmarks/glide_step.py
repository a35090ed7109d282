"""One training step of the draft, forward and backward: ours against a straightforward version of the published one.

    python benchmarks/glide_step.py            the bars at 4,096 tokens and the curve over the row's length
    python benchmarks/glide_step.py --quick    the bars alone
    python benchmarks/glide_step.py --lengths 16384 32768    these anew, beside the others of the last run

Straightforward: the target's whole forward with a cache and full float32 logits, its last keys and values cloned with
gradients on, a float32 copy of the head, and full float32 logits of the draft. Both use the same draft layer and the same
attention. Each measurement has a process of its own. Kept in benchmarks/results/glide_step_cpu.{json,png}.

Shapes: B rows, S tokens, V vocabulary.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.peak import best, measure
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, Qwen2Glide
from longspec.models.attention.visibility import Visibility
from longspec.states.forward import STATES_ATTENTION, TargetStates

RESULTS = Path(__file__).parent / "results"
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}
PUBLISHED, HARD, CUT, SOFT = "straightforward", "ours, hard", "ours, hard, no target loss", "ours, soft"
CHUNKED = "ours, hard, target in chunks"
CURVES = (PUBLISHED, HARD, CUT, SOFT, CHUNKED)
CHUNK = 2048
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
SHARE = 0.7  # of the memory that is free now; what would take more is left out of the curve
BAR_LENGTH, BAR_MEMORY, BAR_TIME = 4096, 0.35, 1.0


def build(loss: str) -> Glide:
    """A draft beside a random target."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE)
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION)
    states = TargetStates(target.requires_grad_(False).eval())
    return Qwen2Glide(config, "random", draft=Draft(anchors="off", lag_mode="random", loss=loss), states=states)


def straightforward_step(glide: Glide, ids_BS: Tensor, lag: int) -> None:
    """The published forward and backward, as one writes it down."""
    positions_BS = torch.arange(ids_BS.shape[1])[None]
    with torch.no_grad():
        cache = DynamicCache()
        output = glide.target(ids_BS, position_ids=positions_BS, past_key_values=cache, use_cache=True, labels=ids_BS)
    keys, values = (x.clone().requires_grad_() for x in (cache.layers[-1].keys, cache.layers[-1].values))
    embedded_BSH = glide.model.embed_tokens(ids_BS)
    rope = glide.model.rotary_emb(embedded_BSH, positions_BS)
    layer = glide.draft_model
    own, lags = Visibility(window=512), Visibility(lag_B=torch.tensor([lag]))
    hidden_BSH = layer(embedded_BSH, rope, layer.own_keys_values(embedded_BSH, rope), (keys, values), own, lags)
    head_VH = glide.lm_head.weight.to(torch.float32, copy=True)
    logits_BSV = F.linear(hidden_BSH.float(), head_VH)
    loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    assert output.loss is not None
    loss.backward()


def run_case(case: dict[str, Any]) -> None:
    """Measure one case and print it."""
    way = case["way"]
    glide = build("soft" if way == SOFT else "hard")
    glide.states.chunk = CHUNK if way == CHUNKED else None

    def step(length: int = case["length"]) -> None:
        ids_BS = torch.randint(0, SHAPE["vocab_size"], (1, length))
        if way == PUBLISHED:
            straightforward_step(glide, ids_BS, 2)
        else:
            glide(ids_BS, ids_BS, lag=2, with_llm_loss=way != CUT).loss.backward()
        glide.zero_grad()

    step(16)  # thread pools and kernels
    print(json.dumps(measure(step, torch.device("cpu"))))


def would_fit(way: str, rows: list[dict[str, Any]]) -> bool:
    """Whether twice the memory of this way's last length is there; none of them grows faster than its rows."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable"))
    last = [row["MiB"] for row in rows if row["way"] == way][-1:]
    return not last or 2 * last[0] < SHARE * free


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory and time over the row's length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, field, label in zip(
        panels, ("MiB", "seconds"), ("peak above the weights, MiB", "seconds, one thread"), strict=True
    ):
        for way in CURVES:
            own = [row for row in rows if row["way"] == way]
            axes.plot([row["length"] for row in own], [row[field] for row in own], marker="o", markersize=3, label=way)
        axes.set(xscale="log", yscale="log", xlabel="tokens in the row", ylabel=label, xticks=LENGTHS)
        axes.set_xticklabels([f"{length // 1024}k" for length in LENGTHS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"A draft's training step, vocabulary {SHAPE['vocab_size']:,}, on a CPU", fontsize=11)
    figure.savefig(path, dpi=130)


def main() -> None:
    """All cases; fails when a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="the bars alone, nothing kept")
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case)
        return
    kept, lengths = RESULTS / "glide_step_cpu.json", (BAR_LENGTH,) if options.quick else options.lengths
    before = json.loads(kept.read_text())["rows"] if kept.exists() and not options.quick else []
    rows = [row for row in before if row["length"] not in lengths]
    for length in lengths:
        for way in CURVES:
            if would_fit(way, rows):
                case = {"way": way, "length": length}
                rows.append(case | best(__file__, case, 2 if length <= BAR_LENGTH else 0))
                print(f"{length} {way}: {rows[-1]['MiB']:.0f} MiB, {rows[-1]['seconds']:.2f} s", flush=True)
            else:
                print(f"{length} {way}: left out, it would not fit into the memory that is free", flush=True)
    rows.sort(key=lambda row: row["length"])
    at_bar = {row["way"]: row for row in rows if row["length"] == BAR_LENGTH}
    ratios = {
        way: {field: round(at_bar[way][field] / at_bar[PUBLISHED][field], 3) for field in ("MiB", "seconds")}
        for way in CURVES[1:]
    }
    for way, ratio in ratios.items():
        print(f"{way}: {ratio['MiB']} x the memory, {ratio['seconds']} x the time of the straightforward step")
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        about = {"torch": torch.__version__, "shape": SHAPE, "chunk": CHUNK}
        content = about | {f"ratios at {BAR_LENGTH}": ratios, "rows": rows}
        kept.write_text(json.dumps(content, indent=1) + "\n")
        draw(rows, RESULTS / "glide_step_cpu.png")
    if ratios[HARD]["MiB"] > BAR_MEMORY or ratios[HARD]["seconds"] > BAR_TIME:
        sys.exit(f"{HARD}: not within {BAR_MEMORY} x the memory and {BAR_TIME} x the time")


if __name__ == "__main__":
    main()
