"""How much of a real target's distributions its k likeliest tokens hold, and what storing their log-probabilities rounds.

    python benchmarks/top_k_labels.py --target <folder of a target> --conversations gsm8k_train.jsonl

Texts are Python's own library and, where a JSON Lines file of them is given, answered questions by the target's chat template.
Kept of each kind of text and k: the mass (mean, and 5th percentile over tokens), and the bytes a token beside those of a final
hidden state; and of log-probabilities rounded to float16 and to bfloat16 the largest error, the divergence of the rounded
distribution of k + 1 outcomes from the exact one, and the error of the rest's mass.

Shapes: R rows, S tokens of a row, N tokens, H hidden width, k likeliest tokens.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec.demo.stdlib import read_modules
from longspec.models.teachers import TOP_BYTES
from longspec.states.declaration import top_k_of

COUNTS = (16, 64, 256, 1024)
STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTH = 1024
# best_token, log_sum_exp and next_log_prob, four bytes each.
OTHER_BYTES = 12


def library(tokenizer: Any) -> Iterator[list[int]]:
    """Every eighth module of Python's own library."""
    modules = read_modules(Path(sysconfig.get_paths()["stdlib"]))
    return (tokenizer(text)["input_ids"] for _, text in islice(modules, 0, None, 8) if text is not None)


def conversations(tokenizer: Any, path: Path) -> Iterator[list[int]]:
    """Every tenth record's question and answer, by the chat template."""
    for line in islice(path.open(encoding="utf-8"), 0, None, 10):
        record = json.loads(line)
        turns = [{"role": role, "content": record[key]} for role, key in (("user", "question"), ("assistant", "answer"))]
        yield tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]


def rows_of(documents: Iterator[list[int]], rows: int) -> Tensor:
    """The first tokens, one document behind the other, [R, S]."""
    tokens: list[int] = []
    while len(tokens) < rows * LENGTH:
        tokens += next(documents)
    return torch.tensor(tokens[: rows * LENGTH]).view(rows, LENGTH)


@torch.no_grad()
def measured(model: Any, ids_RS: Tensor) -> tuple[Tensor, ...]:
    """The likeliest tokens after each of the rows' tokens but the last one."""
    parts = []
    for ids_S in ids_RS:
        final_SH = model.model(ids_S[None]).last_hidden_state[0]
        parts.append(top_k_of(final_SH[:-1], model.lm_head.weight, max(COUNTS), None, 1.0, ids_S[1:]))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def outcomes(log_probs_Nk: Tensor) -> Tensor:
    """Probabilities of the k tokens and of the rest, [N, k + 1], as the loss takes them."""
    p_Nk = log_probs_Nk.double().exp()
    sum_N1 = p_Nk.sum(-1, keepdim=True)
    return torch.cat([p_Nk / sum_N1.clamp(min=1), (1 - sum_N1).clamp(min=0)], dim=-1)


def rounding(log_probs_Nk: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """What storage in a dtype does; the divergence in nats a token."""
    stored_Nk = log_probs_Nk.to(dtype)
    exact, rounded = outcomes(log_probs_Nk), outcomes(stored_Nk)
    # A rest that rounding has made 0 is no divergence without end: float32's least number stands for it.
    tiny = torch.finfo(torch.float32).tiny
    ratio = exact.clamp(min=tiny).log() - rounded.clamp(min=tiny).log()
    return {
        "largest_error": float((stored_Nk.double() - log_probs_Nk.double()).abs().max()),
        "divergence": float((exact * ratio).sum(-1).mean()),
        "rest_error": float((exact[:, -1] - rounded[:, -1]).abs().mean()),
    }


def figures(top: tuple[Tensor, ...], final_bytes: int) -> dict[str, Any]:
    """Of one kind of text, by k."""
    found: dict[str, Any] = {}
    _, all_Nk, _, best_N, next_log_prob_N = top
    for k in COUNTS:
        log_probs_Nk = all_Nk[:, :k]
        mass_N = log_probs_Nk.double().exp().sum(-1)
        size = TOP_BYTES * k + OTHER_BYTES
        found[str(k)] = {
            "mass": float(mass_N.mean()),
            "mass_5th_percentile": float(mass_N.quantile(0.05)),
            "bytes_a_token": size,
            "of_a_final_hidden_state": size / final_bytes,
            "stored": {name: rounding(log_probs_Nk, dtype) for name, dtype in STORED.items()},
        }
    return {"tokens": len(best_N), "target_loss": -float(next_log_prob_N.mean()), "by_k": found}


def main() -> None:
    """Measure a target on both kinds of text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of a target")
    parser.add_argument("--conversations", type=Path, help="JSON Lines with the fields question and answer")
    parser.add_argument("--rows", type=int, default=10, help="rows of 1,024 tokens of each kind of text")
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    model = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=torch.float32)
    texts = {"library": library(tokenizer)}
    if chosen.conversations is not None:
        texts["conversations"] = conversations(tokenizer, chosen.conversations)
    found = {}
    for name, documents in texts.items():
        found[name] = figures(measured(model, rows_of(documents, chosen.rows)), 2 * model.config.hidden_size)
        print(name, json.dumps(found[name], indent=1))
    target = {"name": chosen.target.name, "vocabulary": model.config.vocab_size, "hidden_size": model.config.hidden_size}
    machine.write("top_k_labels", {"machine": machine.describe(("torch", "transformers")), "target": target, "texts": found})


if __name__ == "__main__":
    main()
