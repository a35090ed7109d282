"""Train a small Qwen2 target from scratch on packed rows: all kinds of text until the end, with reproducible weights.

Suffixes: B rows, S tokens, V vocabulary.
"""

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from longspec.atomic_files import files_below, new_folder
from longspec.config import Build
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.pack.arrow_shards import PackedRows, Row, stacked
from longspec.data.schedule import Schedule
from longspec.distributed import log
from longspec.draft_vocabulary import tokenizer_files
from longspec.models.attention.backends import TARGET_ATTENTION
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import NO_LABEL
from longspec.target.fetch import write_manifest

MICRO_TOKENS = 2048  # tokens of one forward: small enough for the caches, measured fastest on CPU
HELD_IN_BATCHES = 4  # batches of each phase that give its final loss
LOG_EVERY = 10
WEIGHT_DECAY = 0.1
CLIP = 1.0


def collate(rows: list[Row]) -> tuple[dict[str, Any], torch.Tensor]:
    """Batch rows of one length: return the model's input, and labels_BS, each at the place that predicts it.

    A document's first token and padding are never labels.
    """
    names = ("input_ids_S", "loss_mask_S", "position_ids_S", "document_ids_S")
    input_ids_BS, loss_mask_BS, position_ids_BS, document_ids_BS = (torch.from_numpy(stacked(rows, name)) for name in names)
    labels_BS = torch.full_like(input_ids_BS, NO_LABEL)
    labels_BS[:, :-1] = input_ids_BS[:, 1:].masked_fill(loss_mask_BS[:, 1:] == 0, NO_LABEL)
    # Rows of one document each, without padding, need no ids, and then share their calls.
    alike = bool((document_ids_BS == document_ids_BS[:, :1]).all())
    visibility = Visibility(document_ids_BT=None if alike else document_ids_BS)
    return {"input_ids": input_ids_BS, "position_ids": position_ids_BS, "visibility": visibility}, labels_BS


@dataclass
class Phase:
    """Hold one entry of the mixture with its rows."""

    name: str  # shown in the log and the manifest
    rows: PackedRows
    schedule: Schedule  # the rows that each of its steps trains
    steps: int

    def batch(self, step: int) -> list[Any]:
        """Return the rows of its 0-based step."""
        return [self.rows[row] for row in self.schedule.batch(step)]


def open_phases(build: Build, data: list[Path]) -> list[Phase]:
    """Return the mixture's entries, each with the packed rows of its dataset and length."""
    packed = {(rows.manifest["dataset"], rows.sequence_length): rows for rows in map(PackedRows, data)}
    phases = []
    for entry in build.mixture:
        rows = packed[entry["dataset"], entry["sequence_length"]]
        schedule = Schedule([len(rows)], [1.0], entry["rows"], build.seed)
        phases.append(Phase(f"{entry['dataset']}-{entry['sequence_length']}", rows, schedule, entry["steps"]))
    return phases


def order_of(steps: list[int]) -> list[int]:
    """Return the phase that each step trains; phases are mixed evenly throughout, so that no kind of text is forgotten."""
    total, done, order = sum(steps), [0] * len(steps), []
    for step in range(total):
        behind = [share * (step + 1) / total - made for share, made in zip(steps, done, strict=True)]
        chosen = max(range(len(steps)), key=lambda phase: behind[phase])
        done[chosen] += 1
        order.append(chosen)
    assert done == steps
    return order


def learning_rate(build: Build, step: int, total: int) -> float:
    """Return the rate of a 0-based step: linear warm-up, then a cosine to zero."""
    warm_up = max(1, round(build.warmup_ratio * total))
    if step < warm_up:
        return build.lr * (step + 1) / warm_up
    return build.lr * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))


def new_model(build: Build, eos: int) -> Qwen2ForCausalLM:
    """Make a fresh Qwen2 of the build's shape, fp32, with tied embeddings."""
    config = Qwen2Config(
        vocab_size=build.vocabulary,
        hidden_size=build.hidden,
        num_hidden_layers=build.layers,
        num_attention_heads=build.heads,
        num_key_value_heads=build.key_value_heads,
        intermediate_size=build.intermediate,
        max_position_embeddings=build.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": build.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=eos,
        dtype="float32",
        attn_implementation=TARGET_ATTENTION,
    )
    # No pad_token_id: padding is eos here, and torch would keep a padding token's embedding at zero.
    torch.manual_seed(build.seed)
    return Qwen2ForCausalLM(config)


def summed_loss(model: Qwen2ForCausalLM, rows: list[Any]) -> torch.Tensor:
    """Return the summed cross entropy of the rows' labels, in nats."""
    inputs, labels_BS = collate(rows)
    logits_BSV = model(**inputs, use_cache=False).logits
    return cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=NO_LABEL, reduction="sum")


def micro_batches(rows: list[Any]) -> list[list[Any]]:
    """Return the rows of a step in groups of about MICRO_TOKENS tokens."""
    size = max(1, MICRO_TOKENS // len(rows[0].input_ids_S))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def count_labels(rows: list[Any]) -> int:
    """Count the labels among the rows' tokens."""
    return sum(int(row.loss_mask_S.sum()) for row in rows)


def train_step(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, rows: list[Any]) -> float:
    """Take one optimizer step; return the mean loss of the rows' labels."""
    labels, loss = count_labels(rows), 0.0
    for micro in micro_batches(rows):
        part = summed_loss(model, micro) / labels
        part.backward()
        loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def fit(model: Qwen2ForCausalLM, build: Build, phases: list[Phase]) -> dict[str, float]:
    """Train through all phases with AdamW; return each phase's final loss on rows it trained on. Logs every few steps."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]  # norms and biases, without weight decay
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=build.lr, betas=(0.9, 0.95), fused=True)
    order = order_of([phase.steps for phase in phases])
    done = [0] * len(phases)
    recent: list[float] = []
    model.train()
    for step, number in enumerate(order):
        phase = phases[number]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(build, step, len(order))
        loss = train_step(model, optimizer, phase.batch(done[number]))
        if not math.isfinite(loss):
            raise ValueError(f"step {step + 1}: the loss is {loss}; lower build.lr (now {build.lr})")
        done[number] += 1
        recent.append(loss)
        if (step + 1) % LOG_EVERY == 0 or step + 1 == len(order):
            log(f"step {step + 1}/{len(order)}  loss {sum(recent) / len(recent):.3f}")
            recent.clear()
    model.eval()
    losses = {}
    for phase in phases:  # on the first batches that each has trained on
        rows = [row for step in range(min(HELD_IN_BATCHES, phase.steps)) for row in phase.batch(step)]
        with torch.no_grad():
            losses[phase.name] = sum(summed_loss(model, micro).item() for micro in micro_batches(rows)) / count_labels(rows)
    return losses


def make(build: Build, tokenizer_manifest: Path, data: list[Path], out: Path) -> dict[str, Any]:
    """Train the target, write its folder next to the manifest `out`, then the manifest; return its facts about training."""
    tokenizer, _ = load_tokenizer(tokenizer_manifest)
    phases = open_phases(build, data)
    # So that every run with the same number of threads gives the same weights.
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    model = new_model(build, tokenizer.eos_token_id)
    loss = fit(model, build, phases)
    trained = {
        "loss": {name: round(value, 4) for name, value in loss.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": sum(phase.steps for phase in phases),
    }
    seconds = round(time.perf_counter() - started, 1)
    out.unlink(missing_ok=True)  # an old manifest must not describe another target's files
    folder, own = out.parent / "target", Path(tokenizer.name_or_path)
    with new_folder(folder) as beside:
        eos = tokenizer.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
        model.save_pretrained(beside)
        for name in tokenizer_files(own):
            shutil.copyfile(own / name, beside / name)
    write_manifest(out, folder, "build", files_below(folder), **trained)
    return trained | {"seconds": seconds}  # not in the manifest, which is the same for the same target whenever it is made
