"""Makes speculators.safetensors beside this file: DFlash's training as the package `speculators` computes it.

    /tmp/speculators/bin/python -m tests.golden.dflash.make

in the environment of tests/golden/shared.py. Written is what speculators' own model (models/dflash/core.py) makes of packed
rows by KL divergence: the logits of all slots, its loss, and the gradient of every weight.

Its draw of anchors is replaced by a fixed one, whose blocks end in their documents: it would also train slots past a
document's end. Its loss is left as it is, the mean over what its mask names of divergences weighted exp(-(k - 1) / gamma).
Masked are tokens that are not trained, and those for which the target prefers a token outside the draft vocabulary. The head
of a reduced vocabulary, which it freezes, is given a gradient. The norms of keys of the draft `full` are the same in all
layers.

Shapes: S tokens of a row, A blocks, W slots of a block, H hidden width, T target's vocabulary, V draft vocabulary.
"""

from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3Config

from tests.golden.shared import TARGET, gradients, randomize, target_states, vocabulary_of, write

LAYERS, SLOTS, GAMMA, MASK = [1, 2, 4], 5, 3.0, 63
# Documents of a row, and its anchors, ascending.
ROWS = (((18, 14), (1, 2, 7, 12, 19, 24, 27)), ((23,), (0, 5, 6, 16, 17)))
# The draft vocabulary, the number of layers, and whether the norms of keys are one.
DRAFTS = {"full": (64, 3, True), "reduced": (40, 2, False)}


def build(folder: str, vocabulary: int, depth: int, is_tied: bool) -> DFlashDraftModel:
    """The draft as its own training makes it beside a target's folder, with random weights."""
    model = DFlashDraftModel.from_training_args(
        Qwen3Config(**TARGET | {"num_hidden_layers": depth}),
        **vocabulary_of(vocabulary),
        block_size=SLOTS,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
        verifier_name_or_path=folder,
        draft_attn_impl="eager",
    )
    model.lm_head.requires_grad_(model.t2d is not None)
    model.embed_tokens.requires_grad_(False)
    randomize(model)
    for layer in model.layers[1:] if is_tied else ():
        layer.self_attn.k_norm.weight.data.copy_(model.layers[0].self_attn.k_norm.weight)
    return model


def row(
    model: DFlashDraftModel, target: LlamaForCausalLM, lengths: tuple[int, ...], places: tuple[int, ...]
) -> dict[str, Tensor]:
    """One row of random documents: what goes in and what comes out."""
    documents, anchors = [torch.randint(0, TARGET["vocab_size"], (length,)) for length in lengths], torch.tensor(places)
    taps_SX, last_SH, logits_ST = target_states(target, documents, LAYERS)
    ids_S, numbers_S = torch.cat(documents), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    trained_S = torch.ones_like(ids_S, dtype=torch.bool)
    trained_S[9::10] = False
    counts_S = trained_S.clone()
    if model.t2d is not None:  # of token j: whether the target's likeliest one in its place can be said
        counts_S[1:] &= model.t2d[logits_ST.argmax(-1)][:-1]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    kept: list[Tensor] = []
    model.zero_grad()
    with model.lm_head.register_forward_hook(lambda _, __, output: kept.append(output[0].detach())):
        _, loss, _ = model(
            hidden_states=taps_SX[None],
            input_ids=ids_S[None],
            loss_mask=counts_S[None].long(),
            verifier_last_hidden_states=last_SH[None],
            document_ids=numbers_S[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            loss_config=resolve_loss_config("kl_div", "eager"),
            gamma=GAMMA,
            max_anchors=len(anchors),
        )
    loss.backward()
    places_AK = anchors[:, None] + torch.arange(1, SLOTS)
    found = {"ids": ids_S, "documents": numbers_S, "trained": trained_S, "anchors": anchors, "loss": loss.detach()}
    found |= {"count": counts_S[places_AK].sum(), "logits": kept[0].unflatten(0, (len(anchors), SLOTS))}
    return found | gradients(model)


if __name__ == "__main__":
    drafts = {name: {"depth": depth, "tied_k_norm": is_tied} for name, (_, depth, is_tied) in DRAFTS.items()}
    shape = {"layers": LAYERS, "block_size": SLOTS, "gamma": GAMMA, "mask_token": MASK}
    file, about = Path(__file__).with_name("speculators.safetensors"), {"shape": shape, "drafts": drafts}
    write(file, 5, DRAFTS, build, lambda *given: (row(*given, *each) for each in ROWS), about)
