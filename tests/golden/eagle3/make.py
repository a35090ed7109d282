"""Makes speculators.safetensors beside this file: EAGLE-3's training as the package `speculators` computes it.

    /tmp/speculators/bin/python -m tests.golden.eagle3.make

in the environment of tests/golden/shared.py. Written is what speculators' own model (models/eagle3/core.py) makes of documents:
the logits of all slots in every step, its loss, and the gradient of every weight; also each step's loss where all tokens are
trained.

Its loss is left as it is: in step i the mean KL divergence over the predictions that its mask names, weighted decay^i. Masked
are predictions of tokens that are not trained, of what would follow a document, and those where the target prefers a token
outside the draft vocabulary; the first tokens are not trained, so that each step has as many predictions as the others. Its
head, which from_training_args freezes, is given a gradient.

Shapes: S tokens of a document, H hidden width, T target's vocabulary, V draft vocabulary, K steps.
"""

from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.golden.shared import TARGET, gradients, randomize, target_states, vocabulary_of, write

LAYERS, STEPS, DECAY = [0, 2, 3], 3, 0.8
LENGTHS = (16, 13)
# The draft vocabulary, and whether it has the norms of EAGLE-3.1.
DRAFTS = {"reduced": (40, False), "norms": (64, True)}


def build(folder: str, vocabulary: int, has_norms: bool) -> Eagle3DraftModel:
    """The draft as its own training makes it beside a target's folder, with random weights."""
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**TARGET | {"num_hidden_layers": 1}),
        **vocabulary_of(vocabulary),
        norm_before_residual=False,
        fc_norm=has_norms,
        norm_output=has_norms,
        target_layer_ids=LAYERS,
        ttt_steps=STEPS,
        verifier_name_or_path=folder,
        draft_attn_impl="eager",
    )
    model.lm_head.requires_grad_(True)
    randomize(model)
    return model


def is_trained(length: int) -> Tensor:
    """Which tokens [S] are trained: none that some step cannot predict, nor one among the others."""
    trained_S = torch.ones(length, dtype=torch.bool)
    trained_S[: STEPS + 1] = False
    trained_S[length // 2] = False
    return trained_S


def run(model: Eagle3DraftModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A training forward: its loss, each step's own without its weight, and the logits [K, S - 1, V]."""
    logits: list[Tensor] = []
    with model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].detach())):
        _, loss, metrics = model(
            **{name: tensor[None] for name, tensor in shift_batch(batch).items() if name != "lengths"},
            document_ids=torch.zeros_like(batch["input_ids"][None, 1:]),
            ttt_steps=STEPS,
            ttt_step_loss_decay=DECAY,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    return loss, torch.stack([metrics[f"loss_{step}_sum"] / DECAY**step for step in range(STEPS)]), torch.stack(logits)


def document(model: Eagle3DraftModel, target: LlamaForCausalLM, length: int) -> dict[str, Tensor]:
    """One random document: what goes in and what comes out, also with all of its tokens trained."""
    ids_S, trained_S = torch.randint(0, TARGET["vocab_size"], (length,)), is_trained(length)
    auxiliary_S3H, last_SH, logits_ST = target_states(target, [ids_S], LAYERS)
    # Of token j: whether a prediction of the token after it can count, and whether it does.
    possible_S = torch.arange(length) < length - 1
    if model.t2d is not None:
        possible_S &= model.t2d[logits_ST.argmax(-1)]
    counts_S = possible_S & trained_S.roll(-1)
    assert counts_S.any(), "take another seed: the draft vocabulary masks all"
    batch = {
        "input_ids": ids_S,
        "hidden_states": auxiliary_S3H,
        "verifier_last_hidden_states": last_SH,
        "loss_mask": counts_S,
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }
    model.zero_grad()
    loss, _, logits_KSV = run(model, batch)
    loss.backward()
    found = {"ids": ids_S, "trained": trained_S, "count": counts_S.sum(), "loss": loss.detach(), "logits": logits_KSV}
    found["step_losses"] = run(model, batch | {"loss_mask": possible_S})[1]
    return found | gradients(model)


if __name__ == "__main__":
    settings = {name: {"fc_norm": has_norms, "norm_output": has_norms} for name, (_, has_norms) in DRAFTS.items()}
    about = {"layers": LAYERS, "steps": STEPS, "decay": DECAY, "drafts": settings}
    file = Path(__file__).with_name("speculators.safetensors")
    write(file, 4, DRAFTS, build, lambda *given: (document(*given, length) for length in LENGTHS), about)
